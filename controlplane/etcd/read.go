package etcd

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"unique"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
)

// maxNamed is how many bad keys and values are remembered, so as to name each once.
const maxNamed = 4096

// names remembers what has been said of which key. Safe for concurrent use.
type names struct {
	mu   sync.Mutex
	seed maphash.Seed
	said map[uint64]uint64 // by key: what was said of it
	full bool              // and that was said
}

// first reports whether this is said of the key for the first time; full, that it is
// the first thing there is no memory for.
func (n *names) first(key []byte, what string) (first, full bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.said == nil {
		n.said, n.seed = map[uint64]uint64{}, maphash.MakeSeed()
	}
	k, w := maphash.Bytes(n.seed, key), maphash.String(n.seed, what)
	switch was, known := n.said[k]; {
	case known && was == w:
		return false, false
	case !known && len(n.said) >= maxNamed:
		full, n.full = !n.full, true
		return false, full
	}
	n.said[k] = w
	return true, false
}

// mended forgets a key: it is good now, or gone.
func (n *names) mended(key []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.said) > 0 {
		delete(n.said, maphash.Bytes(n.seed, key))
	}
}

// skip counts what is left out, and names it once.
func (s *Store) skip(f registry.Fault, key []byte, why string) {
	s.Skipped[f].Inc()
	switch first, full := s.named.first(key, why); {
	case first:
		s.log.Warn("left out of the registry", "key", fmt.Sprintf("%.256s", key), "fault", string(f), "reason", why)
	case full:
		s.log.Warn("left out of the registry: there are too many to name, further ones are only counted", "named", maxNamed)
	}
}

// read is the row under a key, which is a good one; ok is false where there is none:
// it is bad, or of another kind. Of a bad value Key is set all the same.
func (s *Store) read(key, value []byte) (k registry.Key, e *registrypb.ServiceEndpoint, ok bool) {
	k, ok = s.readKey(key)
	if !ok {
		return k, nil, false
	}
	f, why := registry.NoFault, ""
	e = &registrypb.ServiceEndpoint{}
	if err := proto.Unmarshal(value, e); err != nil {
		f, why = registry.BadValue, "its bytes are no ServiceEndpoint: "+err.Error()
	} else if f, why = registry.RowFault(e); f == registry.NoFault {
		switch serves := registry.Protocols(e); {
		case !sameIP(e.GetIp(), k.IP):
			f, why = registry.Misplaced, fmt.Sprintf("the row is that of %.64s", e.GetIp())
		case !slices.Contains(serves, k.Protocol):
			f, why = registry.Misplaced, fmt.Sprintf("the row serves no port of %s", k.Protocol)
		}
	}
	if f != registry.NoFault {
		s.skip(f, key, why)
		return k, nil, false
	}
	s.named.mended(key)
	return k, e, true
}

// readKey is the key of a row; what is bad is said, what is of another kind is not.
func (s *Store) readKey(key []byte) (registry.Key, bool) {
	k, err := registry.ParseKey(key)
	if err != nil {
		s.skip(registry.BadKey, key, err.Error())
		return registry.Key{}, false
	}
	// The parts are of one text, which none of them should keep in memory.
	k.Region, k.Cluster, k.IP = unique.Make(k.Region).Value(), unique.Make(k.Cluster).Value(), strings.Clone(k.IP)
	k.Service.Namespace, k.Service.Name = unique.Make(k.Service.Namespace).Value(), unique.Make(k.Service.Name).Value()
	return k, k.Kind == registry.EndpointKey
}

func sameIP(a, b string) bool {
	x, err := netip.ParseAddr(a)
	if err != nil {
		return false
	}
	y, err := netip.ParseAddr(b)
	return err == nil && x == y
}
