"""`homelab init`: where machines are looked for, how they are asked, and the file that comes of it."""
