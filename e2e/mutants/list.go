package mutants

// All are the breaks, in the order of the properties they break (design 5).
var All = []Mutant{}
