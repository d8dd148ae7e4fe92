"""Attention of many query heads over one head that is key and value: window, compressed entries, or a selection of them."""
