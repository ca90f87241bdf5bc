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
	// The host, folded; behind it room for a dot and the caller's namespace (a DNS label).
	var buf [maxName + 1 + 64]byte
	k := 0
	i := 0
	for ; i < len(authority) && authority[i] != ':'; i++ {
		c := authority[i]
		switch {
		case k > maxName:
			return n
		case c >= 'A' && c <= 'Z':
			c += 'a' - 'A'
		case c <= ' ' || c >= 0x7f || c == '@' || c == '/' || c == '[' || c == ']':
			return n // no host name: user information, an IPv6 literal, rubbish
		}
		buf[k] = c
		k++
	}
	if i < len(authority) {
		p, ok := ParsePort(authority[i+1:])
		if !ok {
			return n
		}
		n.Port = p
	}
	if k > 0 && buf[k-1] == '.' {
		k--
	}
	if k == 0 || k > maxName {
		return n
	}
	n.WellFormed = true
	if s == nil {
		return n
	}
	t := s.t
	host := buf[:k]
	dots, dot := 0, 0
	for j, c := range host {
		if c == '.' {
			if dots++; dots == 1 {
				dot = j
			}
		}
	}
	if dots == 0 {
		if caller == "" {
			_, n.NoCaller = t.shorts[string(host)]
			return n
		}
		if len(caller) > 63 {
			return n
		}
		buf[k] = '.'
		full := buf[:k+1+copy(buf[k+1:], caller)]
		if i, ok := t.names[string(full)]; ok && t.Services[i].Kubernetes {
			n.Service = t.Services[i]
		}
		return n
	}
	// <svc>.<ns> and one of the endings. The first label and the next are the key.
	end := len(host)
	for j := dot + 1; j < len(host); j++ {
		if host[j] == '.' {
			end = j
			break
		}
	}
	if dot == 0 || end == dot+1 {
		return n // an empty label
	}
	tail := host[end:]
	n.Below = string(tail) == t.suffix
	at, ok := t.names[string(host[:end])]
	if !ok {
		return n
	}
	svc := t.Services[at]
	if n.Below {
		n.Service = svc
		return n
	}
	switch string(tail) {
	case "", ".svc", ".svc.cluster.local":
		if svc.Kubernetes {
			n.Service = svc
		}
	}
	return n
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
