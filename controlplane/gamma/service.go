package gamma

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

// Service is a Service whose named target ports are not all resolved yet.
type Service struct {
	Service  model.Service
	Selector map[string]string
	Lines    []int // of each of Service.Ports
}

// Service takes what the mesh needs of s, which is o decoded; nil: it is not in force.
func (r *Reader) Service(o Object, s *corev1.Service) *Service {
	flaws := r.OwnAnnotations(o, s.Annotations, AnnotationTargetPorts)
	bad := func(line int, format string, args ...any) {
		flaws = append(flaws, Flaw{Line: line, Reason: fmt.Sprintf(format, args...)})
	}
	f := &Service{Selector: s.Spec.Selector}
	f.Service.Name = model.ServiceName{Namespace: o.Namespace, Name: o.Name}
	f.Service.Generated = s.Labels[LabelMeshService] == "true"
	if why := validation.IsDNS1123Label(o.Name); len(why) > 0 {
		bad(o.At("metadata", "name"), "metadata.name %q cannot be a Service's name: %s", o.Name, strings.Join(why, "; "))
	}
	f.Service.ClusterIPs = clusterIPs(o, s, bad)

	annotated, _ := r.own(s.Annotations, AnnotationTargetPorts)
	given := targetPorts(o, annotated, bad)
	seen := map[string]bool{}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		where, line := fmt.Sprintf("spec.ports[%d]: ", i), o.At("spec", "ports", strconv.Itoa(i))
		var udp bool
		switch p.Protocol {
		case "", corev1.ProtocolTCP:
		case corev1.ProtocolUDP:
			udp = true
		case corev1.ProtocolSCTP:
			r.Report(o.String(), line, "%sport %d: the mesh carries no SCTP: this port is left out", where, p.Port)
			continue
		default:
			bad(o.At("spec", "ports", strconv.Itoa(i), "protocol"), "%sport %d: protocol %q does not exist: write TCP or UDP", where, p.Port, p.Protocol)
			continue
		}
		if p.Port < 1 || p.Port >= 1<<16 {
			bad(o.At("spec", "ports", strconv.Itoa(i), "port"), "%sport %d is no port: write a number from 1 to 65535", where, p.Port)
			continue
		}
		number := uint16(p.Port)
		if key := model.PortKey(number, udp); seen[key] {
			bad(line, "%sport %s stands twice: keep one", where, key)
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
			bad(o.At("spec", "ports", strconv.Itoa(i), "targetPort"), "%stargetPort %d is no port: write a number from 1 to 65535, or a port's name", where, t.IntVal)
			continue
		default:
			if why := validation.IsValidPortName(t.StrVal); len(why) > 0 {
				bad(o.At("spec", "ports", strconv.Itoa(i), "targetPort"), "%stargetPort %q is no port's name: %s; write a number without quotes, or a name", where, t.StrVal, strings.Join(why, "; "))
				continue
			}
			port.TargetName = t.StrVal
			port.Target = given[model.PortKey(number, udp)]
			delete(given, model.PortKey(number, udp))
		}
		// A generated Service carries mesh 18081 and mesh-tcp 18082 (contract 9.8); nobody else may have them (contract 1.3).
		if !f.Service.Generated && (model.ReservedPort(number) || model.ReservedPort(port.Target)) {
			const text = "%sport %s: %d, %d, %d and %d are reserved by the mesh and can be no Service's port or target: choose another"
			if r.API { // it exists whatever is said of it, and its other ports may have a policy
				r.Report(o.String(), line, text+"; this port is left out", where, model.PortKey(number, udp), model.PortCapture, model.PortMesh, model.PortProxy, model.PortRaw)
			} else {
				bad(line, text, where, model.PortKey(number, udp), model.PortCapture, model.PortMesh, model.PortProxy, model.PortRaw)
			}
			continue
		}
		if app := p.AppProtocol; f.Service.Generated && app != nil {
			var known bool
			if port.Class, known = classOf(*app, udp); !known {
				r.Report(o.String(), o.At("spec", "ports", strconv.Itoa(i), "appProtocol"),
					"%sport %s: appProtocol %q says nothing to the mesh: leave it out, or write http or tcp (UDP: udp); until the service has an endpoint the port counts as one without it",
					where, model.PortKey(number, udp), *app)
			}
		}
		f.Service.Ports = append(f.Service.Ports, port)
		f.Lines = append(f.Lines, line)
	}
	for key := range given {
		bad(o.At("metadata", "annotations", AnnotationTargetPorts), "annotation %s: the Service has no port %s with a named targetPort: remove the entry",
			AnnotationTargetPorts, key)
	}
	if r.Refuse(o, flaws, Refused) {
		return nil
	}
	return f
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

func clusterIPs(o Object, s *corev1.Service, bad func(int, string, ...any)) []netip.Addr {
	texts, at := s.Spec.ClusterIPs, "clusterIPs"
	if len(texts) == 0 && s.Spec.ClusterIP != "" {
		texts, at = []string{s.Spec.ClusterIP}, "clusterIP"
	}
	var ips []netip.Addr
	for i, t := range texts {
		if t == corev1.ClusterIPNone || t == "" {
			continue
		}
		ip, why := Address(t)
		if why != "" {
			field := "spec." + at
			if at == "clusterIPs" {
				field += fmt.Sprintf("[%d]", i)
			}
			bad(o.At("spec", at, strconv.Itoa(i)), "%s: cluster address %q: %s", field, t, why)
			continue
		}
		ips = append(ips, ip)
	}
	return ips
}

// targetPorts reads AnnotationTargetPorts.
func targetPorts(o Object, annotation string, bad func(int, string, ...any)) map[string]uint16 {
	out := map[string]uint16{}
	for _, entry := range strings.Split(annotation, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		port, target, _ := strings.Cut(entry, "=")
		number, proto, hasProto := strings.Cut(port, "/")
		n, err := strconv.ParseUint(number, 10, 16)
		t, err2 := strconv.ParseUint(target, 10, 16)
		if err != nil || err2 != nil || t == 0 || hasProto && proto != "UDP" && proto != "TCP" {
			bad(o.At("metadata", "annotations", AnnotationTargetPorts), "annotation %s: entry %q: write <port>=<pod port> or <port>/UDP=<pod port>", AnnotationTargetPorts, entry)
			continue
		}
		out[model.PortKey(uint16(n), proto == "UDP")] = uint16(t)
	}
	return out
}

// Address reads an address that other hosts can reach the holder by; why says what is wrong with s.
func Address(s string) (ip netip.Addr, why string) {
	ip, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return ip, "not an IP address: write one like 10.0.0.1 or fd00::1"
	case ip.Zone() != "" || ip.IsUnspecified() || ip.IsMulticast():
		return ip, "not an address of one host: write one like 10.0.0.1 or fd00::1"
	}
	return ip.Unmap(), ""
}
