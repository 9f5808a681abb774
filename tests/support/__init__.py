"""What several tests share: networks, data, runs and guards, with a folder or a file for each room that has its own."""
