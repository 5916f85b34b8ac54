"""What a study is declared with: settings and measures."""
