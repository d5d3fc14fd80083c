"""What a draft head is: configuration, modules, vocabulary, frozen target parts, formats in and out."""
