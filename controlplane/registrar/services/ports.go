package services

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// maxPorts is how many declared ports a generated Service has: an object of Kubernetes
// may not grow without end, and the annotations of one pod could name 40,000.
const maxPorts = 1000

// port is a port of a Service: what is kept right of one. Comparable.
type port struct {
	name     string
	number   int32
	protocol corev1.Protocol
	target   intstr.IntOrString
	app      string // appProtocol; empty: none
}

func (p port) compare(o port) int {
	return cmp.Or(cmp.Compare(p.number, o.number), cmp.Compare(p.protocol, o.protocol), cmp.Compare(p.name, o.name))
}

// spec is what a generated Service should be, and what is odd about it.
type spec struct {
	ports   []port // ascending
	warning string // what the rows say that is not in it, or not as they all say
}

// specOf is what the rows of a service ask for (contract 9.8).
func specOf(rows []*registrypb.ServiceEndpoint) spec {
	valid := slices.DeleteFunc(slices.Clone(rows), func(e *registrypb.ServiceEndpoint) bool {
		fault, _ := registry.RowFault(e)
		return fault != registry.NoFault
	})
	classes, _ := endpointmeta.Classes(valid, registry.Ports)
	s := spec{ports: []port{meshPort("mesh", model.PortProxy), meshPort("mesh-tcp", model.PortRaw)}}
	var odd []string
	declared, left := 0, 0
	for _, c := range classes {
		if model.ReservedPort(c.Number) {
			odd = append(odd, fmt.Sprintf("port %d is the mesh's own and is left off", c.Number))
			continue
		}
		if declared == maxPorts {
			left++
			continue
		}
		declared++
		if c.Disagree != "" {
			odd = append(odd, fmt.Sprintf("pods disagree on port %d (%s): it is %s", c.Number, c.Disagree, c.Class))
		}
		switch c.Class {
		case model.HTTP:
			s.ports = append(s.ports, declaredPort(c.Number, corev1.ProtocolTCP, "http"))
		case model.TCP:
			s.ports = append(s.ports, declaredPort(c.Number, corev1.ProtocolTCP, "tcp"))
		}
		if c.Class == model.UDP || c.AlsoUDP {
			s.ports = append(s.ports, declaredPort(c.Number, corev1.ProtocolUDP, ""))
		}
	}
	if left > 0 {
		odd = append(odd, fmt.Sprintf("%d ports beyond the first %d are left off", left, maxPorts))
	}
	slices.SortFunc(s.ports, port.compare)
	s.warning = strings.Join(odd, "; ")
	return s
}

func declaredPort(n uint16, p corev1.Protocol, app string) port {
	return port{fmt.Sprintf("p%d-%s", n, strings.ToLower(string(p))), int32(n), p, intstr.FromInt32(int32(n)), app}
}

func meshPort(name string, n uint16) port {
	return port{name, int32(n), corev1.ProtocolTCP, intstr.FromInt32(int32(n)), ""}
}

// portsOf are the ports of a Service, ascending.
func portsOf(s *corev1.Service) []port {
	out := make([]port, 0, len(s.Spec.Ports))
	for _, p := range s.Spec.Ports {
		q := port{p.Name, p.Port, p.Protocol, p.TargetPort, ""}
		if p.AppProtocol != nil {
			q.app = *p.AppProtocol
		}
		out = append(out, q)
	}
	slices.SortFunc(out, port.compare)
	return out
}

// object is the port as Kubernetes has it.
func (p port) object() corev1.ServicePort {
	out := corev1.ServicePort{Name: p.name, Port: p.number, Protocol: p.protocol, TargetPort: p.target}
	if p.app != "" {
		out.AppProtocol = &p.app
	}
	return out
}
