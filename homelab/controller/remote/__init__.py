"""The only code that opens a connection: SSH sessions, a local stand-in, and the shipped agent behind them."""
