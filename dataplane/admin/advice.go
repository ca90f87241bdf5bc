package admin

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Advice says what would have worked where something was refused.
type Advice struct {
	// Text says in a sentence or two what is wrong and how to mend it.
	Text string `json:"text"`
	// Service that was meant, "shop/cart"; empty: none is known.
	Service string `json:"service,omitempty"`
	// Ports of it (or, inbound, of the pod), ascending.
	Ports []PortAdvice `json:"ports,omitempty"`
	// Names by which this caller may call it, the shortest first. Where no service is
	// known, names that are like the one that was asked for, or of the caller's namespace.
	Names []string `json:"names,omitempty"`
	// Try are flows, and requests on them, that the same snapshot does not refuse: arguments for explain.
	Try []Attempt `json:"try,omitempty"`
}

// PortAdvice is a port of a service and what it speaks: http, tcp or udp.
type PortAdvice struct {
	Port  uint16 `json:"port"`
	Class string `json:"class"`
}

// Attempt is a flow that works. Request is empty where it carries none.
type Attempt struct {
	Flow    string `json:"flow"`
	Request string `json:"request,omitempty"`
}

// Bounds of what an Advice lists.
const (
	maxTry   = 6
	maxAlike = 5
)

// mend says, by the name of a reason, what is wrong and what to do. A refusal with a reason that
// is not here says only which ports and names there are.
var mend = map[string]string{
	"bad-authority":            "write the authority as host or host:port, the port a number of 1 to 65535 without leading zeros, and no user before an @",
	"loop":                     "the pod dialled 18001, or another of the mesh's own ports at an address of its own, which leads back to the proxy; dial a service by one of its ports",
	"idle":                     "the port speaks HTTP, and the client never said anything on it",
	"blackhole":                "18082 stands for a service's raw-TCP port, and the dialled address is no service with one",
	"port-mismatch":            "the port that was dialled and the port in Host are different; dial the port that Host names, or leave it out of Host",
	"port-not-declared":        "the service has no such HTTP port; use one that it has",
	"port-not-http":            "the port is not HTTP, and the proxy port takes HTTP only; dial the service's own address on it",
	"port-required":            "a name without a port means port 80 here, which the service does not have; say the port",
	"caller-namespace-unknown": "a short name means a service of the caller's namespace, and the connection carries none; use a full name",
	"no-such-name":             "no service has this name for this caller",
	"no-endpoint":              "name and port are right, and no endpoint behind them is healthy; look at the service's pods",
	"await-rows":               "the service is known, and its pods are being asked for; try again in a moment",
	"invalid-backend":          "the route that was picked leads to a backend that is not valid; the route's status and the node's problems say why",
	"broken-service":           "the service's own objects contradict each other; the node's problems say how",
	"no-rule":                  "the service has routes, and no rule of them matches the request; the steps say what each one wants",
	"rbac-denied":              "an RBAC filter does not allow this request; the rule that is named says which",
	"path-spelling":            "the path can be spelled in two ways that are allowed differently; send it without dot segments, empty segments and escapes of them",
	"too-large":                "the request is larger than the rules of the port look at: send a shorter path, field or query value (8192 bytes are the most where a rule has a regular expression), or fewer query parameters (256)",
	"connect":                  "CONNECT is never tunnelled; send the request itself",
	"unknown-sni":              "the pod does not serve the port that the caller's server name asks for",
	"no-verdict":               "the flow has no direction",
}

// advise is nil for a verdict that refuses nothing.
func advise(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, v *decide.Verdict) *Advice {
	text := mend[v.Reason.String()]
	if v.Action != decide.Refuse && (text == "" || v.Status < 400) {
		return nil
	}
	a := &Advice{Text: text}
	if f.Dir == model.Inbound {
		if pod := s.WorkloadOf(f); pod != nil {
			a.Service = pod.Service.String()
			for _, p := range pod.Ports {
				a.Ports = append(a.Ports, PortAdvice{p.Number, p.Class.String()})
			}
			a.try(s, f, r, nil)
		} else {
			a.Text = strings.TrimPrefix(a.Text+"; the pod is not on this node: explain at its own node, or with --node", "; ")
		}
		return a
	}
	if v.Reason == decide.Loop { // the address that was dialled is of no use to anybody
		g := *f
		g.Dir, g.Dst = model.Proxy, model.OrigDst{}
		f = &g
	}
	authority := f.Host
	if r != nil {
		authority = string(r.Authority)
	}
	svc := snapshot.Name(s, authority, f.Namespace).Service
	if svc == nil {
		svc = s.Address(f.Dst.Addr())
	}
	if svc == nil {
		a.Names = alike(s, authority, f.Namespace)
		for _, n := range a.Names {
			a.try(s, f, r, snapshot.Name(s, n, f.Namespace).Service)
		}
		return a
	}
	a.Service = svc.Name.String()
	ports := svc.Ports
	if svc.Kind == snapshot.MeshOnly && f.Dir == model.Captured && f.Dst.Port() != model.PortProxy {
		ports = svc.PodPorts // contract 4.9
	}
	for _, p := range ports {
		a.Ports = append(a.Ports, PortAdvice{p.Number, p.Class.String()})
	}
	a.Names = names(s, svc, f.Namespace)
	a.try(s, f, r, svc)
	return a
}

// names are the spellings of svc that work for a caller of namespace ns, the shortest first.
func names(s *snapshot.Snapshot, svc *snapshot.Service, ns string) []string {
	full := svc.Name.Name + "." + svc.Name.Namespace
	var out []string
	for _, n := range []string{svc.Name.Name, full, full + ".svc", full + ".svc.cluster.local", full + "." + s.Domain()} {
		if snapshot.Name(s, n, ns).Service == svc {
			out = append(out, n)
		}
	}
	return out
}

// try adds flows that reach svc, or inbound the pod, and which s does not refuse: the
// decision core is asked, so that nothing is advised that it would refuse again.
func (a *Advice) try(s *snapshot.Snapshot, f *model.Flow, r *httpmsg.Head, svc *snapshot.Service) {
	add := func(g model.Flow, host string) {
		if len(a.Try) >= maxTry {
			return
		}
		var h *httpmsg.Head
		t := Attempt{}
		if host != "" {
			h = &httpmsg.Head{Method: []byte("GET"), Scheme: []byte("http"), Path: []byte("/"), Minor: 1}
			if r != nil && string(r.Method) != "CONNECT" {
				*h = *r
			}
			h.Authority = []byte(host)
			g.Sniff, g.Host = model.SniffHTTP11, host
			t.Request = model.RequestString(h)
		}
		v, _ := decide.Explain(s, &g, h)
		if v.Action != decide.Forward && v.Action != decide.Deliver {
			return
		}
		if t.Flow = g.String(); !slices.Contains(a.Try, t) {
			a.Try = append(a.Try, t)
		}
	}
	if f.Dir == model.Inbound {
		for _, p := range a.Ports {
			g := *f
			g.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(f.Dst.Addr(), p.Port)}
			if p.Class == model.HTTP.String() && r != nil {
				add(g, cmp.Or(string(r.Authority), "localhost"))
			} else {
				g.Sniff, g.Host = model.SniffNone, ""
				add(g, "")
			}
		}
		return
	}
	if svc == nil {
		return
	}
	spelled := names(s, svc, f.Namespace)
	if len(spelled) == 0 {
		return
	}
	name := spelled[0]
	if f.Namespace == "" {
		name = spelled[len(spelled)-1]
	}
	captured := f.Dir == model.Captured
	for _, ports := range [][]snapshot.Port{svc.Ports, svc.PodPorts} {
		for _, p := range ports {
			g := *f
			g.Sniff, g.Host = model.SniffNone, ""
			if captured {
				g.Dst = model.OrigDst{AddrPort: netip.AddrPortFrom(f.Dst.Addr(), p.Number)}
			}
			switch {
			case p.Class == model.HTTP && captured:
				add(g, name)
			case p.Class == model.HTTP:
				add(g, fmt.Sprintf("%s:%d", name, p.Number))
			case p.Class == model.TCP && captured && s.Address(f.Dst.Addr()) == svc:
				add(g, "")
			}
		}
	}
}

// alike are names for a caller of namespace ns that are like authority, the likest
// first; where nothing is, those of the caller's own namespace.
func alike(s *snapshot.Snapshot, authority, ns string) []string {
	host, _, _ := strings.Cut(strings.ToLower(authority), ":")
	first, rest, _ := strings.Cut(host, ".")
	space, _, _ := strings.Cut(rest, ".")
	space = cmp.Or(space, ns)
	type near struct {
		svc  *snapshot.Service
		away int
	}
	var all []near
	for _, svc := range s.Services() {
		d := distance(first, svc.Name.Name)
		if d > 1+len(first)/4 {
			continue
		}
		if svc.Name.Namespace != space {
			d += 1 + distance(space, svc.Name.Namespace)
		}
		all = append(all, near{svc, d})
	}
	slices.SortStableFunc(all, func(a, b near) int { return cmp.Compare(a.away, b.away) })
	if len(all) == 0 {
		for _, svc := range s.Services() {
			if svc.Name.Namespace == ns {
				all = append(all, near{svc: svc})
			}
		}
	}
	var out []string
	for _, n := range all[:min(len(all), maxAlike)] {
		if sp := names(s, n.svc, ns); len(sp) > 0 {
			if ns == "" {
				sp = sp[len(sp)-1:]
			}
			out = append(out, sp[0])
		}
	}
	return out
}

// maxLabel bounds the names that are compared: no DNS label is longer.
const maxLabel = 63

// distance is how many letters must be put in, taken out or exchanged to make b of a; names
// that are no labels are far apart.
func distance(a, b string) int {
	if len(a) > maxLabel || len(b) > maxLabel {
		return maxLabel
	}
	var row [maxLabel + 1]int
	for j := range len(b) + 1 {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], d
		}
	}
	return row[len(b)]
}

// String is the advice for people: lines.
func (a *Advice) String() string {
	var b strings.Builder
	if a.Text != "" {
		fmt.Fprintf(&b, "why: %s\n", a.Text)
	}
	switch {
	case len(a.Ports) > 0:
		ports := make([]string, len(a.Ports))
		for i, p := range a.Ports {
			ports[i] = fmt.Sprintf("%d (%s)", p.Port, p.Class)
		}
		fmt.Fprintf(&b, "ports of %s: %s\n", a.Service, strings.Join(ports, ", "))
	case a.Service != "":
		fmt.Fprintf(&b, "ports of %s: none is known\n", a.Service)
	}
	if len(a.Names) > 0 {
		what := "names"
		if a.Service == "" {
			what = "names that there are"
		}
		fmt.Fprintf(&b, "%s: %s\n", what, strings.Join(a.Names, ", "))
	}
	for i, t := range a.Try {
		lead := "would work: "
		if i > 0 {
			lead = "            "
		}
		fmt.Fprintf(&b, "%s'%s'", lead, t.Flow)
		if t.Request != "" {
			fmt.Fprintf(&b, " '%s'", t.Request)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
