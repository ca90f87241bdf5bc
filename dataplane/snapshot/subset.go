package snapshot

// maxCombined is how many keys of a service combine in one selection (contract
// 5.10): the first ones by name. Further keys select alone.
const maxCombined = 4

// maxValue is the longest value that selects, in bytes; no request can carry a longer one.
const maxValue = 1<<16 - 1

// Want is one condition of a selection: the endpoint's metadata Key is Value.
type Want struct{ Key, Value []byte }

// subsets of one EndpointSet, made with it.
type subsets struct {
	keys []string // of the service, ascending
	sets map[string]*EndpointSet
}

// RoutableKey reports whether a metadata key may be selected by (contract 1.3).
func RoutableKey(k string) bool {
	switch k {
	case "", "ip", "pod", "cluster", "namespace":
		return false
	}
	for i := range len(k) {
		if c := k[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(k)-1) {
			return false
		}
	}
	return true
}

// makeSubsets indexes endpoints, which are in order, by their metadata: every
// combination of the service's first four keys, and every further key alone.
func makeSubsets(all []*Endpoint, keys []string) *subsets {
	x := &subsets{keys: keys}
	members := map[string][]*Endpoint{}
	var key []byte
	add := func(e *Endpoint, names ...string) {
		key = key[:0]
		for _, n := range names {
			v, ok := e.Metadata[n]
			if !ok || len(v) > maxValue {
				return
			}
			key = appendWant(key, n, v)
		}
		members[string(key)] = append(members[string(key)], e)
	}
	first := x.keys[:min(len(x.keys), maxCombined)]
	for _, e := range all {
		for mask := 1; mask < 1<<len(first); mask++ {
			var names []string
			for i, n := range first {
				if mask>>i&1 == 1 {
					names = append(names, n)
				}
			}
			add(e, names...)
		}
		for _, n := range x.keys[len(first):] {
			add(e, n)
		}
	}
	x.sets = make(map[string]*EndpointSet, len(members))
	for k, m := range members {
		part := newSet(m) // parts of all, in its order
		part.part = k
		x.sets[k] = part
	}
	return x
}

// appendWant writes a condition so that no two lists of conditions look alike:
// keys hold no NUL, and the value's length stands before it.
func appendWant(b []byte, key, value string) []byte {
	b = append(append(b, key...), 0, byte(len(value)>>8), byte(len(value)))
	return append(b, value...)
}

// Subset are the endpoints that meet all conditions of want, which must be
// ascending by key, no key twice. ok is false when such a selection selects
// nothing at all, because keys are in it that do not combine: the request is then
// balanced over the whole set. An empty set with ok: no endpoint meets them.
// It does not allocate while keys and values are short.
func (s *EndpointSet) Subset(want []Want) (set *EndpointSet, ok bool) {
	if len(want) == 0 {
		return s, false
	}
	if s.subsets == nil {
		return noEndpoints, true
	}
	var buf [256]byte
	key := buf[:0]
	for i := range want {
		w := &want[i]
		if len(w.Value) > maxValue {
			return noEndpoints, true
		}
		if len(want) > 1 && s.subsets.alone(w.Key) {
			return s, false
		}
		key = append(append(key, w.Key...), 0, byte(len(w.Value)>>8), byte(len(w.Value)))
		key = append(key, w.Value...)
	}
	if set := s.subsets.sets[string(key)]; set != nil {
		return set, true
	}
	return noEndpoints, true
}

// alone reports whether a key is beyond those that combine.
func (x *subsets) alone(key []byte) bool {
	for i := maxCombined; i < len(x.keys); i++ {
		if x.keys[i] == string(key) {
			return true
		}
	}
	return false
}
