package compile

// Names is how many names x has entries for.
func Names(x *Index) int { return len(x.services) }
