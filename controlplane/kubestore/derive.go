package kubestore

import (
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// pod is what is kept of a pod.
type pod struct {
	metav1.ObjectMeta // name, namespace and version: what the client has to see
	uid               types.UID
	created           int64 // seconds
	deleting          bool
	node              string
	service           model.ServiceName
	runs              bool                        // managed, in phase Running, with an address
	endpoint          *registrypb.ServiceEndpoint // nil: it has no row
	problem           string                      // why not
	fault             registry.Fault              // of the row; NoFault: the annotations are what is wrong
	logged            bool                        // the problem has been
	shadowed          bool                        // that another pod has its address has been logged
	next              *pod                        // at the same address
}

func (p *pod) key() string { return p.Namespace + "/" + p.Name }

func (p *pod) rowID() rowID { return rowID{p.service, p.endpoint.GetIp()} }

// beats reports whether p is shown rather than q, which has the same address.
func (p *pod) beats(q *pod) bool {
	switch {
	case p.deleting != q.deleting:
		return !p.deleting
	case p.created != q.created:
		return p.created > q.created
	}
	return p.key() < q.key()
}

// pod takes from a pod what its row is made of (contract 9.6).
func (s *Store) pod(o runtime.Object) *pod {
	k := o.(*corev1.Pod)
	p := &pod{
		ObjectMeta: objectMeta(&k.ObjectMeta), uid: k.UID, created: k.CreationTimestamp.Unix(), deleting: k.DeletionTimestamp != nil,
		node: k.Spec.NodeName, service: model.ServiceName{Namespace: k.Namespace, Name: k.Spec.ServiceAccountName},
		runs: k.Labels[ManagedLabel] == "true" && k.Status.Phase == corev1.PodRunning && k.Status.PodIP != "",
	}
	if !p.runs {
		return p
	}
	m, err := endpointmeta.Parse(k.Namespace, k.Name, k.Annotations)
	if err != nil {
		p.problem = err.Error()
		return p
	}
	if p.service.Name == "" {
		p.problem = "it names no ServiceAccount, which would be its service"
		return p
	}
	ip, err := netip.ParseAddr(k.Status.PodIP)
	if err != nil {
		p.problem, p.fault = err.Error(), registry.BadAddress
		return p
	}
	e := registry.Encode("", &model.Endpoint{ // the default identity is no part of a row
		Service: p.service, IP: ip, Pod: k.Name, Node: k.Spec.NodeName, Cluster: s.cfg.Cluster, DefaultPort: m.DefaultPort, Ports: m.Ports,
		Weight: m.Weight, Health: health(k), SPIFFEID: m.SPIFFEID, Metadata: m.Metadata,
	}, registry.Local{Check: checkMode(k.Annotations[endpointmeta.KeyHealthCheckMode])})
	if fault, why := registry.RowFault(e); fault != registry.NoFault {
		p.problem, p.fault = why, fault
		return p
	}
	p.endpoint = e
	return p
}

// health is the pod's: draining from the moment of its deletion, else what the Ready
// condition says.
func health(k *corev1.Pod) model.Health {
	if k.DeletionTimestamp != nil {
		return model.Draining
	}
	for _, c := range k.Status.Conditions {
		if c.Type == corev1.PodReady {
			if c.Status == corev1.ConditionTrue {
				return model.Healthy
			}
			return model.Unhealthy // unknown, too: its node is silent
		}
	}
	return model.HealthUnspecified
}

// checkMode is that of the annotation; what is not said stays so on this backend (contract 1.3).
func checkMode(v string) registrypb.ServiceEndpoint_HealthCheckMode {
	switch v {
	case "active":
		return registrypb.ServiceEndpoint_ACTIVE
	case "eds":
		return registrypb.ServiceEndpoint_EDS
	}
	return registrypb.ServiceEndpoint_HEALTH_CHECK_MODE_UNSPECIFIED
}

// node is what is kept of a node.
type node struct {
	metav1.ObjectMeta
	nodeFacts
}

type nodeFacts struct{ region, zone, ip string }

// nodeOf takes from a node what rows are made of.
func nodeOf(o runtime.Object) *node {
	k := o.(*corev1.Node)
	n := &node{ObjectMeta: objectMeta(&k.ObjectMeta), nodeFacts: nodeFacts{
		region: k.Labels[corev1.LabelTopologyRegion], zone: k.Labels[corev1.LabelTopologyZone],
	}}
	for _, a := range k.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			n.ip = a.Address
			break
		}
	}
	return n
}

// objectMeta is as little of an object as the client can do with. Strings are copied: the
// message that they were part of is not kept for them.
func objectMeta(m *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: strings.Clone(m.Namespace), Name: strings.Clone(m.Name), ResourceVersion: m.ResourceVersion}
}
