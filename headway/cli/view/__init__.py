"""What commands print: tables, bars and live views."""
