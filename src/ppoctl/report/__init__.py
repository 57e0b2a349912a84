"""`report`: one HTML file of a run, or of several runs compared. It only reads runs; the file requires no network.

The template `page/page.html` receives texts and tables. The script of the page shows metrics and samples from JSON.
Text of a model or a user is escaped in both.
"""
