"""`report`: one HTML file of a run, or of several runs compared. Runs are only read. The file requires no network.

The template `page/page.html` receives texts and tables. The script of the page reads metrics and samples from JSON.
Text from a model or a user is escaped in both places.
"""
