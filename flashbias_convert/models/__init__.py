"""Reference architectures that no maintained package offers."""
