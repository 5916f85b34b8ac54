"""Reports: panels as data, drawings, one HTML file, citations."""
