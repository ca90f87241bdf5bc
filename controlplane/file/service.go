package file

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	"aether/dataplane/model"
)

// serviceFacts is a Service whose named target ports are not all resolved yet.
type serviceFacts struct {
	svc      model.Service
	selector map[string]string
	ports    []int // line of each of svc.Ports
}

func (r *reader) service(o object) {
	var s corev1.Service
	if r.refuse(o, r.strict(o, &s), refused) {
		return
	}
	flaws := r.ownAnnotations(o, s.Annotations, AnnotationTargetPorts)
	bad := func(line int, format string, args ...any) {
		flaws = append(flaws, flaw{"", line, fmt.Sprintf(format, args...)})
	}
	f := &serviceFacts{selector: s.Spec.Selector}
	f.svc.Name = model.ServiceName{Namespace: o.namespace, Name: o.name}
	f.svc.Generated = s.Labels[LabelMeshService] == "true"
	if why := validation.IsDNS1123Label(o.name); len(why) > 0 {
		bad(o.at("metadata", "name"), "metadata.name %q cannot be a Service's name: %s", o.name, strings.Join(why, "; "))
	}
	f.svc.ClusterIPs = clusterIPs(o, &s, bad)

	given := targetPorts(o, s.Annotations, bad)
	seen := map[string]bool{}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		line := o.at("spec", "ports", strconv.Itoa(i))
		var udp bool
		switch p.Protocol {
		case "", corev1.ProtocolTCP:
		case corev1.ProtocolUDP:
			udp = true
		case corev1.ProtocolSCTP:
			r.report(o.String(), line, "port %d: the mesh carries no SCTP: this port is left out", p.Port)
			continue
		default:
			bad(o.at("spec", "ports", strconv.Itoa(i), "protocol"), "port %d: protocol %q does not exist: write TCP or UDP", p.Port, p.Protocol)
			continue
		}
		if p.Port < 1 || p.Port >= 1<<16 {
			bad(o.at("spec", "ports", strconv.Itoa(i), "port"), "port %d is no port: write a number from 1 to 65535", p.Port)
			continue
		}
		number := uint16(p.Port)
		if key := portKey(number, udp); seen[key] {
			bad(line, "port %s stands twice: keep one", key)
			continue
		} else {
			seen[key] = true
		}
		port := model.ServicePort{Name: p.Name, Number: number, UDP: udp}
		switch t := p.TargetPort; {
		case t.Type == intstr.Int && t.IntVal == 0, t.Type == intstr.String && t.StrVal == "":
			port.Target = number
		case t.Type == intstr.Int && t.IntVal > 0 && t.IntVal < 1<<16:
			port.Target = uint16(t.IntVal)
		case t.Type == intstr.Int:
			bad(o.at("spec", "ports", strconv.Itoa(i), "targetPort"), "targetPort %d is no port: write a number from 1 to 65535, or a port's name", t.IntVal)
			continue
		default:
			if why := validation.IsValidPortName(t.StrVal); len(why) > 0 {
				bad(o.at("spec", "ports", strconv.Itoa(i), "targetPort"), "targetPort %q is no port's name: %s; write a number without quotes, or a name", t.StrVal, strings.Join(why, "; "))
				continue
			}
			port.TargetName = t.StrVal
			port.Target = given[portKey(number, udp)]
			delete(given, portKey(number, udp))
		}
		// A generated Service carries mesh 18081 and mesh-tcp 18082 (contract 9.8); nobody else may have them (contract 1.3).
		if !f.svc.Generated && (model.ReservedPort(number) || model.ReservedPort(port.Target)) {
			bad(line, "port %s: %d and %d are reserved by the mesh and can be no Service's port or target: choose another",
				portKey(number, udp), model.PortProxy, model.PortRaw)
			continue
		}
		if app := p.AppProtocol; f.svc.Generated && app != nil {
			var known bool
			if port.Class, known = classOf(*app, udp); !known {
				r.report(o.String(), o.at("spec", "ports", strconv.Itoa(i), "appProtocol"),
					"port %s: appProtocol %q says nothing to the mesh: leave it out, or write http or tcp (UDP: udp); until the service has an endpoint the port counts as one without it",
					portKey(number, udp), *app)
			}
		}
		f.svc.Ports = append(f.svc.Ports, port)
		f.ports = append(f.ports, line)
	}
	for key := range given {
		bad(o.at("metadata", "annotations", AnnotationTargetPorts), "annotation %s: the Service has no port %s with a named targetPort: remove the entry",
			AnnotationTargetPorts, key)
	}
	if r.refuse(o, flaws, refused) {
		return
	}
	r.add(o, item{service: f})
}

// classOf reads the appProtocol of a generated Service's port. The registrar writes
// http and tcp (contract 9.8), and Dump udp; the other names of HTTP are the ones
// that clusters use (Kubernetes' own, KEP-3726, and those of contract 1.3). Empty says
// nothing, as none at all.
func classOf(appProtocol string, udp bool) (c model.Class, known bool) {
	switch app := strings.ToLower(appProtocol); {
	case app == "":
		return model.ClassNone, true
	case udp:
		if app == "udp" {
			return model.UDP, true
		}
	case slices.Contains([]string{"http", "h1", "http1", "http/1.1", "h2", "http2", "h2c", "grpc", "kubernetes.io/h2c", "kubernetes.io/ws"}, app):
		return model.HTTP, true
	case app == "tcp":
		return model.TCP, true
	}
	return model.ClassNone, false
}

// portKey: "80", "53/UDP".
func portKey(n uint16, udp bool) string {
	if udp {
		return fmt.Sprintf("%d/UDP", n)
	}
	return strconv.Itoa(int(n))
}

func clusterIPs(o object, s *corev1.Service, bad func(int, string, ...any)) []netip.Addr {
	texts, at := s.Spec.ClusterIPs, "clusterIPs"
	if len(texts) == 0 && s.Spec.ClusterIP != "" {
		texts, at = []string{s.Spec.ClusterIP}, "clusterIP"
	}
	var ips []netip.Addr
	for i, t := range texts {
		if t == corev1.ClusterIPNone || t == "" {
			continue
		}
		ip, why := address(t)
		if why != "" {
			bad(o.at("spec", at, strconv.Itoa(i)), "cluster address %q: %s", t, why)
			continue
		}
		ips = append(ips, ip)
	}
	return ips
}

// targetPorts reads AnnotationTargetPorts.
func targetPorts(o object, annotations map[string]string, bad func(int, string, ...any)) map[string]uint16 {
	out := map[string]uint16{}
	for _, entry := range strings.Split(annotations[AnnotationTargetPorts], ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		port, target, _ := strings.Cut(entry, "=")
		number, proto, hasProto := strings.Cut(port, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		t, err2 := strconv.ParseUint(target, 10, 16)
		if err != nil || err2 != nil || t == 0 || hasProto && proto != "UDP" && proto != "TCP" {
			bad(o.at("metadata", "annotations", AnnotationTargetPorts), "annotation %s: entry %q: write <port>=<pod port> or <port>/UDP=<pod port>", AnnotationTargetPorts, entry)
			continue
		}
		out[portKey(uint16(n), proto == "UDP")] = uint16(t)
	}
	return out
}
