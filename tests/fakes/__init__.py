"""Small engines at the ports: a bigram language model that learns for real, in milliseconds. Nothing of the product
imports them."""
