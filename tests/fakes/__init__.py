"""Fake engines behind the ports: a bigram language model that really learns, in milliseconds. No code of ppoctl
imports them."""
