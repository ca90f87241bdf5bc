package exchange

const fieldSize = 48 // bytes of a field beside its text

// Held is how many bytes of memory the exchange's own copies take: of the request's
// head, of what is kept of its body and trailers, and of what a client has no room for of
// an answer of ours.
func (x *Exchange) Held() int {
	return x.outgrown + cap(x.arena) + len(x.chunks)*chunkSize + (cap(x.trailers)+cap(x.Req.Fields))*fieldSize
}
