package replay

import "slices"

// span is the bytes from..end of a stream.
type span struct{ from, end int64 }

// spans is a set of bytes: spans in order, apart from each other, at most
// maxSpans of them.
type spans []span

// maxSpans bounds the holes that are told apart in a stream. Real captures have a handful.
const maxSpans = 128

// add puts from..end into the set and calls each, if it is not nil, with the parts that
// were not there before. In a set that is full, a part that touches no other is taken
// for joined to its neighbour if join is set, and left out if not.
func (s *spans) add(from, end int64, join bool, each func(from, end int64)) {
	if from >= end {
		return
	}
	l := *s
	i, _ := slices.BinarySearchFunc(l, from, func(e span, at int64) int {
		if e.end < at {
			return -1
		}
		return 1
	}) // the first span that ends at or after from
	j := i
	for j < len(l) && l[j].from <= end {
		j++
	}
	if i == j && len(l) >= maxSpans && !join {
		return
	}
	at := from
	for _, e := range l[i:j] {
		if each != nil && at < e.from {
			each(at, min(e.from, end))
		}
		at = max(at, e.end)
	}
	if each != nil && at < end {
		each(at, end)
	}
	if i < j {
		from, end = min(from, l[i].from), max(end, l[j-1].end)
	}
	l = slices.Replace(l, i, j, span{from, end})
	if len(l) > maxSpans {
		k := min(i, len(l)-2)
		l = slices.Replace(l, k, k+2, span{l[k].from, l[k+1].end})
	}
	*s = l
}

// prefix is how many bytes are there from the first one on without a hole.
func (s spans) prefix() int64 {
	if len(s) == 0 || s[0].from > 0 {
		return 0
	}
	return s[0].end
}

// total is how many bytes are there.
func (s spans) total() (n int64) {
	for _, e := range s {
		n += e.end - e.from
	}
	return n
}
