"""Other libraries: each optional, and imported only where one of these modules is used."""
