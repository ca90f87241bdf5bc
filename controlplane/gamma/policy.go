package gamma

import (
	"fmt"

	"aether/controlplane/endpointmeta"
	"aether/dataplane/model"
)

// The length of an EndpointPolicy's udsSocket (contract 10.8).
const (
	leastUDSSocket = 3
	mostUDSSocket  = 64
)

// EndpointPolicy reads an EndpointPolicy (contract 10.8); nil: it is refused. Whether its
// socket can be had is each pod's own matter: its volumes say so, and its UID.
func (r *Reader) EndpointPolicy(o Object) *model.EndpointPolicy {
	var p EndpointPolicy
	flaws := append(r.tolerate(o, r.Strict(o, &p)), r.OwnAnnotations(o, p.Annotations)...)
	bad := func(path []string, format string, args ...any) {
		flaws = append(flaws, Flaw{Line: o.At(path...), Reason: fmt.Sprintf(format, args...)})
	}
	target := name{Namespace: o.Namespace, Name: p.Spec.TargetRef.Name}
	t, socket := p.Spec.TargetRef, p.Spec.UDSSocket
	known := unread(flaws, spec()) // a field that could not be read is reported: that one is missing is no second flaw
	switch {
	case known && t == (TargetRef{}), unreadIn(flaws, "spec.targetRef"):
	case t == (TargetRef{}):
		bad(spec("targetRef"), "no targetRef: name the Service whose pods' socket it is")
	case t.Kind != KindService || t.Group != "" && t.Group != "core":
		bad(spec("targetRef"), "targetRef is a %.100q of group %.100q: name a Service of group \"\"", t.Kind, t.Group)
	default:
		if why := badService(target); why != "" {
			bad(spec("targetRef"), "targetRef: %s", why)
		}
	}
	if _, _, err := endpointmeta.SplitUDS(socket); known && socket == "" {
		// likewise
	} else if socket == "" {
		bad(spec("udsSocket"), "no spec.udsSocket: write <volume>/<file>")
	} else if err != nil {
		bad(spec("udsSocket"), "spec.udsSocket %.100q: %v", socket, err)
	} else if n := len([]rune(socket)); n < leastUDSSocket || n > mostUDSSocket {
		bad(spec("udsSocket"), "spec.udsSocket has %d characters: write %d to %d", n, leastUDSSocket, mostUDSSocket)
	}
	if r.Refuse(o, flaws, Refused) {
		return nil
	}
	return &model.EndpointPolicy{Namespace: o.Namespace, Name: o.Name, Service: target, UDSSocket: socket}
}
