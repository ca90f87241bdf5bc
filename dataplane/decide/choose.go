package decide

import (
	"bytes"
	"math/bits"
	"net/netip"
	"slices"

	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// The fields of contract 5.10.
const (
	fieldPrefix = "x-aether-"
	fieldIP     = "x-aether-ip"
	fieldPod    = "x-aether-pod"
	fieldSubset = "x-aether-subset-"
)

// share is the backend whose share of the weights pick falls into; sum is not 0.
func share(backends []snapshot.Weighted, sum uint64, pick uint32) *snapshot.Weighted {
	x, _ := bits.Mul64(uint64(pick)<<32, sum) // pick/2^32 of the sum, below it
	for i := range backends {
		if x < backends[i].Upto {
			return &backends[i]
		}
	}
	return &backends[len(backends)-1] // not reached: Upto of the last is the sum
}

// PickOf is a pick with which Route draws backend i of r: for a request that has been
// there before. 0 <= i < len(r.Backends). false: it has no weight, and nothing draws it.
func PickOf(r *snapshot.Rule, i int) (uint32, bool) {
	start := uint64(0)
	if i > 0 {
		start = r.Backends[i-1].Upto
	}
	if start == r.Backends[i].Upto {
		return 0, false
	}
	// The first pick whose part of the sum is at start or beyond: ceil(start * 2^32 / sum).
	hi, lo := bits.Mul64(start, 1<<32)
	pick, rest := bits.Div64(hi, lo, r.WeightSum) // start < sum: it fits
	if rest > 0 {
		pick++
	}
	return uint32(pick), share(r.Backends, r.WeightSum, uint32(pick)) == &r.Backends[i]
}

// maxKeys bounds the keys of one selection: a request that names more asks for
// what no endpoint is.
const maxKeys = 16

// selection is what a request asks for beyond the backend.
type selection struct {
	ip, pod []byte // empty: not said
	n       int
	keys    [maxKeys]snapshot.Want // the first n, ascending
	over    bool                   // there are more
}

func (q *selection) want() []snapshot.Want { return q.keys[:q.n] }

// selects narrows set to what the request asks for (contract 5.10). pinned is
// the one endpoint it names. ok is false if no usable endpoint is left and
// fields are to blame.
func selects(s *snapshot.Snapshot, set *snapshot.EndpointSet, p *snapshot.FilterChain, r *httpmsg.Head, t *Trace) (narrowed *snapshot.EndpointSet, pinned *snapshot.Endpoint, ok bool) {
	asked := p != nil && len(p.Selectors) > 0
	for i := range r.Fields {
		if n := r.Fields[i].Name; len(n) > len(fieldPrefix) && string(n[:len(fieldPrefix)]) == fieldPrefix {
			asked = true
		}
	}
	if !asked {
		return set, nil, true
	}
	var q selection
	q.read(s, p, r)
	pin := len(q.ip) > 0 || len(q.pod) > 0
	switch {
	case pin && q.n > 0:
		t.pinAndSubset()
	case pin:
		e := find(set, q.ip, q.pod)
		t.pinned(e, q.ip, q.pod)
		return set, e, e != nil
	case q.over:
		t.manyKeys(q.want())
		return set, nil, false
	case q.n > 0:
		sub, does := set.Subset(q.want())
		if !does {
			t.noSuchSubset(q.want())
			break
		}
		t.subset(q.want(), sub, set)
		return sub, nil, !sub.Empty()
	}
	return set, nil, true
}

// read fills q. Of several lines of a name the first counts, an empty value is
// none, and of one key the field of its own name goes before a Selector.
func (q *selection) read(s *snapshot.Snapshot, p *snapshot.FilterChain, r *httpmsg.Head) {
	ip, pod := false, false
	for i := range r.Fields {
		f := &r.Fields[i]
		if len(f.Name) <= len(fieldPrefix) || string(f.Name[:len(fieldPrefix)]) != fieldPrefix {
			continue
		}
		switch {
		case string(f.Name) == fieldIP:
			if !ip {
				ip, q.ip = true, f.Value
			}
		case string(f.Name) == fieldPod:
			if !pod {
				pod, q.pod = true, f.Value
			}
		case len(f.Name) > len(fieldSubset) && string(f.Name[:len(fieldSubset)]) == fieldSubset:
			q.add(s, f.Name[len(fieldSubset):], f.Value)
		}
	}
	k := 0
	for _, w := range q.want() {
		if len(w.Value) > 0 {
			q.keys[k] = w
			k++
		}
	}
	q.n = k
	if p == nil {
		return
	}
	for i := range p.Selectors {
		if v, _ := r.Get(p.Selectors[i].Header); len(v) > 0 {
			q.add(s, []byte(p.Selectors[i].Key), v)
		}
	}
}

// add adds a condition at its place, unless its key is there already or is none
// that any endpoint of the mesh has.
func (q *selection) add(s *snapshot.Snapshot, key, value []byte) {
	if _, known := slices.BinarySearchFunc(s.SubsetKeys(), key, compareKey); !known {
		return
	}
	at := 0
	for at < q.n {
		c := bytes.Compare(q.keys[at].Key, key)
		if c == 0 {
			return
		}
		if c > 0 {
			break
		}
		at++
	}
	if q.n == maxKeys {
		q.over = true
		return
	}
	copy(q.keys[at+1:], q.keys[at:q.n])
	q.keys[at] = snapshot.Want{Key: key, Value: value}
	q.n++
}

func compareKey(a string, b []byte) int {
	switch {
	case a == string(b):
		return 0
	case a < string(b):
		return -1
	}
	return 1
}

// find is the endpoint with that address and of that pod, as far as they are
// said, that is healthy. Its weight does not matter: it is asked for.
func find(set *snapshot.EndpointSet, ip, pod []byte) *snapshot.Endpoint {
	var a netip.Addr
	if len(ip) > 0 {
		var ok bool
		if a, ok = address(ip); !ok {
			return nil
		}
	}
	for _, e := range set.All() {
		if (len(ip) == 0 || e.Addr.Addr().Unmap() == a) && (len(pod) == 0 || e.Pod == string(pod)) &&
			(e.Health == model.HealthUnspecified || e.Health == model.Healthy) {
			return e
		}
	}
	return nil
}

// address reads an IP address; longer than any of them: none.
func address(b []byte) (netip.Addr, bool) {
	if len(b) > 64 {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(string(b))
	return a.Unmap(), err == nil
}
