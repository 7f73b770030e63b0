"""The queue that the users of one machine share: what decides for all of them, and how a controller asks it."""
