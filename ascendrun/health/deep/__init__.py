"""`doctor --deep`: pair schedules, results, views."""
