"""One tree of errors and the enum of kinds that every server, row and metric uses."""
