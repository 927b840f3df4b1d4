"""The report: folders of runs -> one HTML page that needs nothing but a browser."""
