package exchange

// Held is how many bytes of memory the exchange's own copies take: of the request's
// head, and of what a client has no room for of an answer of ours.
func (x *Exchange) Held() int { return len(x.arena) + len(x.rest) }
