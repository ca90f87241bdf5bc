package reference

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"aether/dataplane/model"
)

const sniffTime = time.Second // 4.2: the longest wait for the first bytes

func refuse(reason string) Answer { return Answer{Action: "refuse", Reason: reason} }

// captured is contract 4.2, in its order.
func (w *world) captured(f *model.Flow, pick uint32) Answer {
	pod := w.workload(f)
	d := f.Dst.Port()
	switch a := f.Dst.Addr().Unmap(); d { // decision 043
	case model.PortCapture:
		return refuse("loop")
	case model.PortMesh, model.PortProxy, model.PortRaw:
		own := pod != nil && slices.Contains(unmapped(pod.IPs), a)
		if own || netip.MustParsePrefix("127.0.0.0/8").Contains(a) || netip.MustParsePrefix("169.254.0.0/16").Contains(a) ||
			netip.MustParsePrefix("fe80::/10").Contains(a.WithZone("")) || a == netip.IPv6Loopback() || a.IsUnspecified() {
			return refuse("loop")
		}
	}
	svc := w.byAddress(f.Dst.Addr())
	if svc == nil {
		return w.foreign(f, pod)
	}
	if svc.broken {
		return refuse("broken-service")
	}
	// 4.6: the rows say what the ports are, so they are waited for before a byte is looked at.
	if svc.await && f.Sniff == model.SniffNone && !f.Waited {
		return Answer{Action: "await", Reason: "await-rows"}
	}
	// Step 1: a server name that a TLSRoute claims.
	arms := w.tlsArms(svc, d, f.Namespace)
	if f.Sniff == model.SniffTLS {
		if arm := bestServerName(arms, f.Host); arm != nil && arm.refuses {
			return refuse("invalid-backend")
		} else if arm != nil {
			return w.forwardRaw(w.split(svc, []*model.Route{arm.route}, arm.rules), "tls-route", pick)
		}
	}
	// Steps 2 and 3: a raw-TCP port, by its number or as 18082. The bytes are not consulted.
	p, reason, raw := port{}, "", false
	if q, ok := svc.port(d); ok && q.class == model.TCP {
		p, reason, raw = q, "declared-tcp", true
	} else if d == model.PortRaw {
		p, raw = svc.rawPort()
		reason = "raw-spelling"
	}
	if raw {
		if len(arms) > 0 && f.Sniff == model.SniffNone {
			return Answer{Action: "sniff", Reason: reason, Wait: sniffTime, HelloOnly: true}
		}
		return w.toTCPPort(svc, p, f.Namespace, reason, pick)
	}
	// Steps 4 and 5.
	q, declared := svc.port(d)
	http := declared && q.class == model.HTTP
	reason = "mesh-address"
	switch {
	case http:
		reason = "declared-http"
	case d == model.PortProxy:
		reason = "proxy-port"
	}
	mustBeHTTP := http || d == model.PortProxy
	switch f.Sniff {
	case model.SniffNone:
		if mustBeHTTP {
			return Answer{Action: "sniff", Reason: reason}
		}
		return Answer{Action: "sniff", Reason: reason, Wait: sniffTime}
	case model.SniffHTTP10, model.SniffHTTP11, model.SniffH2C:
		return Answer{Action: "serve", Reason: reason}
	case model.SniffMalformed: // decision 042: answered by the codec
		if mustBeHTTP {
			return Answer{Action: "serve", Reason: reason}
		}
	case model.SniffSilent:
		if mustBeHTTP {
			return refuse("idle")
		}
	}
	return w.notHTTP(f, pod)
}

// foreign is 4.2 for an address that is no mesh Service's.
func (w *world) foreign(f *model.Flow, pod *model.Workload) Answer {
	d := f.Dst.Port()
	scopedRaw := scoped(pod) && d == model.PortRaw
	if at := w.httpPod(f.Dst.Addr().Unmap(), d); at != "" { // decision 044
		switch f.Sniff {
		case model.SniffNone:
			return Answer{Action: "sniff", Reason: "endpoint-address"}
		case model.SniffHTTP10, model.SniffHTTP11, model.SniffH2C, model.SniffMalformed:
			return Answer{Action: "serve", Reason: "endpoint-address"}
		case model.SniffSilent:
			return refuse("idle")
		}
		return w.notHTTP(f, pod)
	}
	if len(w.services) == 0 && f.Sniff == model.SniffNone && d != model.PortProxy && !scopedRaw {
		return Answer{Action: "passthrough", Reason: "no-names"}
	}
	switch f.Sniff {
	case model.SniffNone:
		reason := "foreign-address"
		if d == model.PortProxy {
			reason = "proxy-port"
		}
		return Answer{Action: "sniff", Reason: reason, Race: true, Wait: sniffTime}
	case model.SniffHTTP10, model.SniffHTTP11, model.SniffH2C:
		if d == model.PortProxy {
			return Answer{Action: "serve", Reason: "proxy-port"}
		}
		host, port, more := strings.Cut(f.Host, ":")
		if n, err := strconv.Atoi(port); more && (err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != port) {
			// A name of the mesh with a port that is none: 400, so it is served.
			if s := w.name(host, f.Namespace).service; s != nil && (s.kind != meshOnly || s.onDial(d, 0)) {
				return Answer{Action: "serve", Reason: "mesh-name"}
			}
		}
		switch n := w.name(f.Host, f.Namespace); {
		case n.noCaller: // 4.4: its requests are refused, with this reason
			return Answer{Action: "serve", Reason: "caller-namespace-unknown"}
		case n.service == nil, n.service.kind == meshOnly && !n.service.onDial(d, n.port): // 4.9
		default:
			return Answer{Action: "serve", Reason: "mesh-name"}
		}
		return Answer{Action: "passthrough", Reason: "not-mesh"}
	}
	return w.notHTTP(f, pod)
}

// httpPod is the service of which some row has the address and declares the port HTTP, as the service serves it; "": none.
func (w *world) httpPod(a netip.Addr, d uint16) string {
	if d == model.PortProxy {
		return ""
	}
	for _, s := range w.services {
		for _, p := range s.pods {
			if p.class != model.HTTP || p.number != d {
				continue
			}
			for _, e := range w.endpoints(s, p) {
				if e.IP.Unmap() == a {
					return s.name.String()
				}
			}
		}
	}
	return ""
}

// scoped: the pod's capture is, and only then is 18082 the mesh's alone.
func scoped(pod *model.Workload) bool { return pod != nil && !pod.Capture.RedirectAll }

// notHTTP is step 5 and the blackhole of scoped capture.
func (w *world) notHTTP(f *model.Flow, pod *model.Workload) Answer {
	if scoped(pod) && f.Dst.Port() == model.PortRaw {
		return refuse("blackhole")
	}
	switch f.Sniff {
	case model.SniffTLS:
		return Answer{Action: "passthrough", Reason: "tls"}
	case model.SniffSilent:
		return Answer{Action: "passthrough", Reason: "server-first"}
	}
	return Answer{Action: "passthrough", Reason: "opaque"}
}

// toTCPPort is a TCPRoute of the port (10.6), or the port itself.
func (w *world) toTCPPort(svc *service, p port, caller, reason string, pick uint32) Answer {
	if r := w.tcpRoute(svc, p.number, caller); r != nil {
		return w.forwardRaw(w.split(svc, []*model.Route{r}, r.Rules), "tcp-route", pick)
	}
	return w.forwardTo(destination{svc: svc, port: p}, reason)
}

// forwardTo one destination: rows that are awaited (4.6), nobody there (4.4), or the hop.
func (w *world) forwardTo(d destination, reason string) Answer {
	if d.svc.await {
		return Answer{Action: "await", Reason: "await-rows"}
	}
	pods := usable(w.endpoints(d.svc, d.port))
	if len(pods) == 0 {
		return refuse("no-endpoint")
	}
	return Answer{Action: "forward", Reason: reason, Backend: d.name(), Endpoints: podNames(pods)}
}

// forwardRaw picks of a split (10.4: an invalid share is refused).
func (w *world) forwardRaw(s []weighted, reason string, pick uint32) Answer {
	d := choose(s, pick)
	if d == nil || d.invalid != "" {
		return refuse("invalid-backend")
	}
	return w.forwardTo(d.destination, reason)
}

// bestServerName is the most specific arm: exact, then the longer suffix, then the
// older route, then its name (10.6).
func bestServerName(arms []tlsArm, host string) *tlsArm {
	if host = strings.ToLower(host); host == "" { // it says no name, which no route can claim
		return nil
	}
	var best *tlsArm
	for i := range arms {
		a := &arms[i]
		if a.unread { // it may have been this name, and goes before all
			return a
		}
		if rest, wild := strings.CutPrefix(a.name, "*."); wild {
			if suffix := "." + rest; rest == "" || !strings.HasSuffix(host, suffix) || len(host) == len(suffix) {
				continue
			}
		} else if host != a.name {
			continue
		}
		if best == nil || moreSpecific(a, best) {
			best = a
		}
	}
	return best
}

func moreSpecific(a, b *tlsArm) bool {
	aw, bw := strings.HasPrefix(a.name, "*"), strings.HasPrefix(b.name, "*")
	switch {
	case aw != bw:
		return bw
	case len(a.name) != len(b.name):
		return len(a.name) > len(b.name)
	}
	return older(a.route, b.route)
}

// inbound is contract 6.2: the SNI is one of the pod's own ports, or nothing.
func (w *world) inbound(f *model.Flow) Answer {
	pod := w.workload(f)
	if pod == nil {
		return refuse("unknown-sni")
	}
	n := f.Dst.Port()
	ports, ok := portsValid(pod.Ports)
	if !ok {
		return refuse("unknown-sni")
	}
	for _, p := range ports {
		if p.Number != n {
			continue
		}
		switch p.Class {
		case model.HTTP:
			return Answer{Action: "deliver", Reason: "served-port", Deliver: deliverText(p), Socket: w.socketOf(pod)}
		case model.TCP:
			a := Answer{Action: "deliver", Reason: "served-port", Deliver: deliverText(p)}
			if rbac, authz := w.inboundPolicy(pod.Service()); len(rbac) == 0 && authz == "" { // decision 035
				a.Socket = w.socketOf(pod)
			}
			return a
		}
	}
	return refuse("unknown-sni")
}
