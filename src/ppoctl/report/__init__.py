"""`report`: one HTML file of one run, or of several compared. A run is only read; the file needs no network.

What is read becomes words and tables (filled into `page/page.html`) and a JSON of figures and samples, which the
page's own script draws. What a model or a user wrote is escaped in both.
"""
