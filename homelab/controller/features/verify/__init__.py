"""`homelab verify`: is the record of a run whole, and do parts of it come out again when they are computed once more?"""
