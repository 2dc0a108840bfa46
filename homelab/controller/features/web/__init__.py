"""`homelab web`: a page on this machine that shows the runs while they train."""
