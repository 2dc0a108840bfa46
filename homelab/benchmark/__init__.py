"""What is measured by `homelab bench`: cells, what a run of one has shown, the table, the charts and the page. Pure."""
