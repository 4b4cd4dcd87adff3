"""One way to build a server, one client, one in-process transport."""
