package snapshot

// maxName bounds a host name that is looked at: 253 is all that DNS has, and
// no service's name is longer.
const maxName = 253

// Named is what an authority means to one caller (contract 4.5).
type Named struct {
	// Service is the mesh service the authority names for this caller; nil: it
	// is no mesh name.
	Service *Service
	// Port is the authority's own; 0: it has none.
	Port uint16
	// WellFormed: host or host:port, with a decimal port of 1 to 65535 without leading
	// zeros. Service is nil when it is not.
	WellFormed bool
	// Below: spelled as a mesh name, two labels before the mesh domain,
	// whether or not there is such a service.
	Below bool
	// NoCaller: a short name that services answer to, on a flow that carries
	// no caller namespace. A fault state: nobody can tell which is meant.
	NoCaller bool
}

// Name reads an authority for a caller in namespace caller, which may be empty
// (a fault state). Letter case does not matter and one trailing dot of the host
// is ignored. It does not allocate.
func Name[T string | []byte](s *Snapshot, authority T, caller string) (n Named) {
	end, fold := len(authority), false
	first, second := -1, -1 // the dots behind the first two labels
scan:
	for i := range len(authority) {
		switch c := authority[i]; {
		case c == ':':
			end = i
			break scan
		case c == '.':
			switch {
			case first < 0:
				first = i
			case second < 0:
				second = i
			}
		case c >= 'A' && c <= 'Z':
			fold = true
		case c <= ' ' || c >= 0x7f || c == '@' || c == '/' || c == '[' || c == ']':
			return n // no host name: user information, an IPv6 literal, rubbish
		}
	}
	if end > maxName+1 {
		return n
	}
	if end < len(authority) {
		p, ok := ParsePort(authority[end+1:])
		if !ok {
			return n
		}
		n.Port = p
	}
	if end > 0 && authority[end-1] == '.' {
		end--
		switch end { // it is behind no label
		case first:
			first = -1
		case second:
			second = -1
		}
	}
	if end == 0 || end > maxName {
		return n
	}
	n.WellFormed = true
	switch {
	case s == nil:
	case fold:
		folded(s.t, authority[:end], caller, first, second, &n)
	default:
		named(s.t, authority[:end], caller, first, second, &n)
	}
	return n
}

// folded is named for a host with capital letters.
func folded[T string | []byte](t *tables, host T, caller string, first, second int, n *Named) {
	var buf [maxName]byte
	for i := range len(host) {
		c := host[i]
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		buf[i] = c
	}
	named(t, buf[:len(host)], caller, first, second, n)
}

// named looks a host up. first and second are the places of its dots, or -1.
func named[T string | []byte](t *tables, host T, caller string, first, second int, n *Named) {
	if first < 0 {
		short(t, host, caller, n)
		return
	}
	// <svc>.<ns> and one of the endings. The first label and the next are the key.
	end := len(host)
	if second >= 0 {
		end = second
	}
	if first == 0 || end == first+1 {
		return // an empty label
	}
	tail := host[end:]
	n.Below = string(tail) == t.suffix
	at, ok := t.names[string(host[:end])]
	if !ok {
		return
	}
	svc := t.Services[at]
	if n.Below {
		n.Service = svc
		return
	}
	switch string(tail) {
	case "", ".svc", ".svc.cluster.local":
		if svc.Kubernetes {
			n.Service = svc
		}
	}
}

// short looks up a name without a namespace: the caller's is meant.
func short[T string | []byte](t *tables, host T, caller string, n *Named) {
	if caller == "" {
		_, n.NoCaller = t.shorts[string(host)]
		return
	}
	const label = 63 // of DNS, as services' names and namespaces are
	if len(host) > label || len(caller) > label {
		return
	}
	var buf [label + 1 + label]byte
	k := copy(buf[:], host)
	buf[k] = '.'
	k += 1 + copy(buf[k+1:], caller)
	if i, ok := t.names[string(buf[:k])]; ok && t.Services[i].Kubernetes {
		n.Service = t.Services[i]
	}
}

// ParsePort reads a decimal port of 1 to 65535 without leading zeros, as it
// stands in an authority.
func ParsePort[T string | []byte](b T) (uint16, bool) {
	if len(b) == 0 || len(b) > 5 || b[0] == '0' {
		return 0, false
	}
	v := uint32(0)
	for i := range len(b) {
		if b[i] < '0' || b[i] > '9' {
			return 0, false
		}
		v = v*10 + uint32(b[i]-'0')
	}
	return uint16(v), v <= 65535
}
