"""What a head accepts, measured: offline against its target, or on a server that speculates."""
