"""Program that trains a small chat model from text: tokenizer and base model."""
