"""Command lines and the local stack. May import `app`; `app` never imports this package."""
