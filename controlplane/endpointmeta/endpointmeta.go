// Package endpointmeta reads the annotations with which a pod says what it
// serves and what it consumes (contract 1.3 and 1.4).
//
//   - One definition for every source of pods: a directory, the API server, a CNI call.
//   - A typo is never a default: what cannot be read is an error that names the
//     annotation, quotes the text and says how to mend it.
//   - What is accepted is whole: Ports is ascending, names no number twice and
//     holds DefaultPort; no port is a reserved one.
//   - Classes says what the pods of a service, taken together, say of its ports.
//
// It knows nothing of where a pod came from, of the registry or of Kubernetes types.
package endpointmeta

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"aether/dataplane/model"
	"aether/mtls/spiffeid"
)

// The annotations (contract 1.3, 1.4).
const (
	KeyPort            = "endpoint.aether.io/port"
	KeyPorts           = "endpoint.aether.io/ports"
	KeyProtocol        = "endpoint.aether.io/protocol"
	KeyWeight          = "endpoint.aether.io/weight"
	KeyHealthPath      = "endpoint.aether.io/health-path"
	KeyHealthCheckMode = "endpoint.aether.io/health-check-mode"
	KeyUDSSocket       = "endpoint.aether.io/uds-socket"
	KeyUpstreams       = "config.aether.io/upstreams"
	KeySPIFFEID        = "aether.io/spiffe-id"

	// MetadataPrefix stands before the key of each piece of free metadata.
	MetadataPrefix = "metadata.endpoint.aether.io/"

	endpointPrefix = "endpoint.aether.io/"
	configPrefix   = "config.aether.io/"
)

// HealthCheck is who watches the health of an endpoint (contract 1.3, 9.2).
type HealthCheck uint8

// The modes. EDS is the default: the pod's node probes and the registry tells.
const (
	HealthEDS HealthCheck = iota
	HealthActive
)

// Meta is what a pod's annotations say, with the defaults of contract 1.3 filled in.
type Meta struct {
	DefaultPort uint16            // endpoint.aether.io/port: liveness, and one more declared port
	Ports       []model.Port      // ascending, no number twice, DefaultPort among them
	Weight      uint32            // 1024 when not said
	HealthPath  string            // "/" when not said
	HealthCheck HealthCheck       // anything but "active" is EDS
	UDSSocket   string            // as written; ResolveUDS says what it comes to. Empty: none
	Metadata    map[string]string // keys without MetadataPrefix; nil when there are none
	Upstreams   []model.ServiceName
	SPIFFEID    string // override of the default identity; empty: none

	// Notes are annotations that were not honoured although the pod stands
	// (contract 1.3 lets these degrade). Ordered by annotation.
	Notes []Error
}

// Error is one annotation that cannot be honoured.
type Error struct {
	Pod    string // "shop/cart-1"
	Key    string // the annotation
	Value  string // its whole value
	Reason string // what is wrong, and how to mend it
}

func (e Error) Error() string {
	return fmt.Sprintf("pod %s: annotation %s: %.256q: %s", e.Pod, e.Key, e.Value, e.Reason)
}

// Errors are all the annotations of one pod that keep it from being served,
// ordered by annotation. errors.As finds the first Error in it.
type Errors []Error

func (e Errors) Error() string {
	s := make([]string, len(e))
	for i := range e {
		s[i] = e[i].Error()
	}
	return strings.Join(s, "; ")
}

// Unwrap makes each Error visible to errors.As.
func (e Errors) Unwrap() []error {
	s := make([]error, len(e))
	for i := range e {
		s[i] = e[i]
	}
	return s
}

// Parse reads the annotations of the pod called name in namespace. The error,
// when there is one, is of type Errors and holds every mistake; Meta is then
// zero, for a pod is served as it says or not at all. Annotations of other
// owners are not looked at.
func Parse(namespace, name string, annotations map[string]string) (Meta, error) {
	p := parser{pod: namespace + "/" + name, ns: namespace, ann: annotations}
	m := Meta{HealthPath: "/"}
	p.ports(&m)
	m.Weight = uint32(p.number(KeyWeight, model.DefaultWeight, 32))
	if v := p.ann[KeyHealthPath]; v != "" {
		m.HealthPath = v
	}
	if p.ann[KeyHealthCheckMode] == "active" {
		m.HealthCheck = HealthActive
	}
	p.uds(&m)
	p.upstreams(&m)
	m.SPIFFEID = p.ann[KeySPIFFEID]
	if m.SPIFFEID != "" {
		const mend = "write spiffe://<trust domain>/<path>, or drop the annotation for the pod's default identity"
		switch id, err := spiffeid.Parse(m.SPIFFEID); {
		case err != nil:
			p.fail(KeySPIFFEID, "%v: %s", err, mend)
		case id.Path() == "":
			p.fail(KeySPIFFEID, "names a trust domain, not a workload: %s", mend)
		}
	}
	p.others(&m)

	if len(p.errs) > 0 {
		byKey(p.errs)
		return Meta{}, p.errs
	}
	byKey(p.notes)
	m.Notes = p.notes
	return m, nil
}

func byKey(e []Error) {
	slices.SortStableFunc(e, func(a, b Error) int { return strings.Compare(a.Key, b.Key) })
}

type parser struct {
	pod, ns string
	ann     map[string]string
	errs    Errors
	notes   []Error
}

func (p *parser) fail(key, format string, args ...any) {
	p.errs = append(p.errs, Error{p.pod, key, p.ann[key], fmt.Sprintf(format, args...)})
}

func (p *parser) note(key, format string, args ...any) {
	p.notes = append(p.notes, Error{p.pod, key, p.ann[key], fmt.Sprintf(format, args...)})
}

// number reads an unsigned decimal of so many bits. Absent is the default;
// present and empty is a mistake, not an absence.
func (p *parser) number(key string, def uint64, bits int) uint64 {
	v, ok := p.ann[key]
	if !ok {
		return def
	}
	n, err := strconv.ParseUint(v, 10, bits)
	if err != nil {
		p.fail(key, "%s: write a whole number from 0 to %d, digits only, or drop the annotation for %d",
			whyNumber(v, err), uint64(1)<<bits-1, def)
		return def
	}
	return n
}

func whyNumber(v string, err error) string {
	switch {
	case v == "":
		return "no number"
	case errors.Is(err, strconv.ErrRange):
		return strconv.Quote(v) + " is too large"
	}
	return strconv.Quote(v) + " is not a number"
}

// ports reads port, ports and protocol. Port 0 is taken, as contract 1.3 says;
// nobody can dial it.
func (p *parser) ports(m *Meta) {
	class := model.HTTP
	if v, ok := p.ann[KeyProtocol]; ok {
		switch v {
		case "http":
		case "tcp":
			class = model.TCP
		default:
			p.fail(KeyProtocol, "unknown protocol %q: write http or tcp (lower case), or drop the annotation for http", v)
		}
	}
	m.DefaultPort = uint16(p.number(KeyPort, model.DefaultPort, 16))
	if model.ReservedPort(m.DefaultPort) {
		p.fail(KeyPort, "%s", reserved(m.DefaultPort))
	}

	set, udp := map[uint16]model.Port{}, map[uint16]bool{}
	n, beyond := 1, 0 // ports so far, the default one included; entries that are left out
	for _, entry := range strings.Split(p.ann[KeyPorts], ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		num, suffix, said := strings.Cut(entry, "=")
		num, suffix = strings.TrimSpace(num), strings.TrimSpace(suffix)
		number, err := strconv.ParseUint(num, 10, 16)
		if err != nil {
			p.fail(KeyPorts, "entry %q: %s: write <port> or <port>=<h1|h2|tcp|udp>, the port a number from 0 to 65535",
				entry, whyNumber(num, err))
			continue
		}
		port := model.Port{Number: uint16(number), Class: class}
		if said {
			if port.Class, port.App = suffixClass(suffix); port.Class == model.ClassNone {
				p.fail(KeyPorts, "entry %q: %s", entry, badSuffix(suffix))
				continue
			}
		}
		if model.ReservedPort(port.Number) {
			p.fail(KeyPorts, "entry %q: %s", entry, reserved(port.Number))
			continue
		}
		if _, there := set[port.Number]; !there && !udp[port.Number] && port.Number != m.DefaultPort {
			if n == model.MaxPorts {
				beyond++
				continue
			}
			n++
		}
		if port.Class == model.UDP { // another transport, another port
			udp[port.Number] = true
			continue
		}
		set[port.Number] = port // same port twice: the later entry wins (contract 1.3)
	}
	if beyond > 0 {
		p.note(KeyPorts, "more than %d ports (the default port counts): the first are served, and the last %d entries are not; declare those that are called", model.MaxPorts, beyond)
	}
	for n := range udp {
		if port, both := set[n]; both {
			port.AlsoUDP = true
			set[n] = port
		} else {
			set[n] = model.Port{Number: n, Class: model.UDP}
		}
	}
	if _, named := set[m.DefaultPort]; !named {
		set[m.DefaultPort] = model.Port{Number: m.DefaultPort, Class: class}
	}
	m.Ports = make([]model.Port, 0, len(set))
	for _, port := range set {
		m.Ports = append(m.Ports, port)
	}
	slices.SortFunc(m.Ports, func(a, b model.Port) int { return int(a.Number) - int(b.Number) })
}

// suffixClass: ClassNone for a suffix that does not exist.
func suffixClass(s string) (model.Class, model.AppCodec) {
	switch strings.ToLower(s) {
	case "h1", "http1", "http/1.1":
		return model.HTTP, model.AppHTTP1
	case "h2", "http2":
		return model.HTTP, model.AppH2C
	case "tcp":
		return model.TCP, 0
	case "udp":
		return model.UDP, 0
	}
	return model.ClassNone, 0
}

func badSuffix(s string) string {
	switch strings.ToLower(s) {
	case "":
		return "nothing after \"=\": write h1, h2, tcp or udp, or drop the \"=\""
	case "grpc", "h2c":
		return fmt.Sprintf("unknown protocol %q: write h2, which is HTTP/2 without TLS to the application", s)
	case "http", "https", "tls":
		return fmt.Sprintf("unknown protocol %q: write h1 or h2 for HTTP, or tcp for bytes the application itself decrypts", s)
	}
	return fmt.Sprintf("unknown protocol %q: write h1, h2, tcp or udp", s)
}

func reserved(n uint16) string {
	return fmt.Sprintf("port %d is reserved by the mesh (its listeners have %d, %d and %d, and %d is its raw-TCP spelling) and can be no application's port: let the application listen on another",
		n, model.PortCapture, model.PortMesh, model.PortProxy, model.PortRaw)
}

// uds: what a socket comes to is ResolveUDS's to say; one that cannot be used degrades
// to TCP delivery (contract 1.3, 1.7).
func (p *parser) uds(m *Meta) {
	v, ok := p.ann[KeyUDSSocket]
	if !ok {
		return
	}
	m.UDSSocket = v
	if v == "" {
		p.note(KeyUDSSocket, "says nothing: ignored; write <volume>/<file>, or drop the annotation")
	} else if _, _, err := SplitUDS(v); err != nil {
		p.note(KeyUDSSocket, "%v: delivered over TCP instead", err)
	}
}

// cleanSegment: one path segment that no cleaning would change (contract 1.7).
func cleanSegment(s string) bool {
	return s != "" && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}

func (p *parser) upstreams(m *Meta) {
	seen := map[model.ServiceName]bool{}
	for _, entry := range strings.Split(p.ann[KeyUpstreams], ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		n := model.ServiceName{Namespace: p.ns, Name: entry}
		if ns, name, qualified := strings.Cut(entry, "/"); qualified {
			// A key with an empty half or a second slash is an error, never another name (contract 1.1).
			if ns == "" || name == "" || strings.Contains(name, "/") {
				p.fail(KeyUpstreams, "entry %q: write <service> or <namespace>/<service>", entry)
				continue
			}
			n = model.ServiceName{Namespace: ns, Name: name}
		}
		if !seen[n] {
			seen[n] = true
			m.Upstreams = append(m.Upstreams, n)
		}
	}
}

// others gathers metadata, and finds annotations that nobody will ever read.
func (p *parser) others(m *Meta) {
	endpoint := []string{KeyPort, KeyPorts, KeyProtocol, KeyWeight, KeyHealthPath, KeyHealthCheckMode, KeyUDSSocket}
	for k, v := range p.ann {
		switch {
		case strings.HasPrefix(k, MetadataPrefix):
			key := k[len(MetadataPrefix):]
			if key == "" {
				p.fail(k, "no key after %q: write %sversion, say", MetadataPrefix, MetadataPrefix)
				continue
			}
			if m.Metadata == nil {
				m.Metadata = map[string]string{}
			}
			m.Metadata[key] = v
		case strings.HasPrefix(k, endpointPrefix) && !slices.Contains(endpoint, k):
			// The whole prefix is ours: a misspelt protocol must not serve a port as HTTP.
			p.fail(k, "no such annotation: the ones that exist are %s", strings.Join(endpoint, ", "))
		case strings.HasPrefix(k, configPrefix) && k != KeyUpstreams:
			p.note(k, "no such annotation: ignored; the one that exists is %s", KeyUpstreams)
		}
	}
}
