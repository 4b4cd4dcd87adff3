"""Wire to wire, in pure tables: Chat, Responses, Messages."""
