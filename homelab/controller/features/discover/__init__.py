"""`homelab init`: where machines are looked for, which of them are one machine, and the file that names them."""
