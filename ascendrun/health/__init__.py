"""Judgements, pure: what facts about nodes mean."""
