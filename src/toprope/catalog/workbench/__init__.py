"""`workbench`: a small office (calendar, mail, customers) with tasks that are checked by the office as it is left."""
