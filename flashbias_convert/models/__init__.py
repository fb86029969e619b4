"""Reference architectures that no maintained package offers, as models of their usual libraries."""
