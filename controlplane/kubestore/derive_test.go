package kubestore

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"aether/controlplane/registrypb"
)

// TestDerive is contract 9.6, a line a sentence, on pods as the API server gives them.
func TestDerive(t *testing.T) {
	s := &Store{cfg: Config{Cluster: "c1"}}
	ready := func(st corev1.ConditionStatus) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: st}}
		}
	}
	annotated := func(k, v string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{k: v} }
	}
	base := func() *registrypb.ServiceEndpoint {
		return &registrypb.ServiceEndpoint{
			Ip: "10.0.0.1", ClusterName: "c1", Port: 8080, Weight: 1024, Health: registrypb.ServiceEndpoint_HEALTHY, Ports: []uint32{8080},
			PortProtocols:      map[uint32]registrypb.PortProtocol{8080: registrypb.PortProtocol_PORT_PROTOCOL_HTTP},
			KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{Namespace: "shop", PodName: "cart-1", NodeName: "node1"},
		}
	}
	none := func(*registrypb.ServiceEndpoint) {}
	for _, tt := range []struct {
		name string
		pod  func(*corev1.Pod)
		want func(*registrypb.ServiceEndpoint) // nil: no row
		runs bool
	}{
		{"ready", func(*corev1.Pod) {}, none, true},
		{"not ready", ready(corev1.ConditionFalse), func(e *registrypb.ServiceEndpoint) { e.Health = registrypb.ServiceEndpoint_UNHEALTHY }, true},
		{"its node is silent", ready(corev1.ConditionUnknown), func(e *registrypb.ServiceEndpoint) { e.Health = registrypb.ServiceEndpoint_UNHEALTHY }, true},
		{"no Ready condition", func(p *corev1.Pod) { p.Status.Conditions = nil }, func(e *registrypb.ServiceEndpoint) {
			e.Health = registrypb.ServiceEndpoint_HEALTH_UNSPECIFIED
		}, true},
		{"being deleted, and ready still", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(9, 0)} }, func(e *registrypb.ServiceEndpoint) {
			e.Health = registrypb.ServiceEndpoint_DRAINING
		}, true},
		{"pending", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, nil, false},
		{"ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }, nil, false},
		{"no address", func(p *corev1.Pod) { p.Status.PodIP = "" }, nil, false},
		{"not managed", func(p *corev1.Pod) { p.Labels[ManagedLabel] = "True" }, nil, false},
		{"an ignored namespace is not filtered here", func(p *corev1.Pod) { p.Namespace = "kube-system" }, func(e *registrypb.ServiceEndpoint) {
			e.KubernetesMetadata.Namespace = "kube-system"
		}, true},
		{"ports", annotated("endpoint.aether.io/ports", "8080=h2,5432=tcp,53=udp"), func(e *registrypb.ServiceEndpoint) {
			e.Ports = []uint32{53, 5432, 8080}
			e.PortProtocols[53], e.PortProtocols[5432] = registrypb.PortProtocol_PORT_PROTOCOL_UDP, registrypb.PortProtocol_PORT_PROTOCOL_TCP
		}, true},
		{"weight", annotated("endpoint.aether.io/weight", "7"), func(e *registrypb.ServiceEndpoint) { e.Weight = 7 }, true},
		{"metadata", annotated("metadata.endpoint.aether.io/version", "v2"), func(e *registrypb.ServiceEndpoint) {
			e.Metadata = map[string]string{"version": "v2"}
		}, true},
		{"an identity of its own", annotated("aether.io/spiffe-id", "spiffe://td/x"), func(e *registrypb.ServiceEndpoint) { e.SpiffeId = "spiffe://td/x" }, true},
		{"probed by its node", annotated("endpoint.aether.io/health-check-mode", "eds"), func(e *registrypb.ServiceEndpoint) {
			e.HealthCheckMode = registrypb.ServiceEndpoint_EDS
		}, true},
		{"probed by callers", annotated("endpoint.aether.io/health-check-mode", "active"), func(e *registrypb.ServiceEndpoint) {
			e.HealthCheckMode = registrypb.ServiceEndpoint_ACTIVE
		}, true},
		{"a typo is no default", annotated("endpoint.aether.io/protocol", "htpp"), nil, true},
		{"a port that is none", annotated("endpoint.aether.io/port", "65536"), nil, true},
		{"a reserved port", annotated("endpoint.aether.io/port", "18081"), nil, true},
		{"an address that is none", func(p *corev1.Pod) { p.Status.PodIP = "ten" }, nil, true},
		{"no account", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "" }, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart-1", Labels: map[string]string{ManagedLabel: "true"}},
				Spec:       corev1.PodSpec{NodeName: "node1", ServiceAccountName: "cart"},
				Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"},
			}
			ready(corev1.ConditionTrue)(k)
			tt.pod(k)
			p := s.pod(k)
			if p.runs != tt.runs {
				t.Fatalf("runs: %t, want %t", p.runs, tt.runs)
			}
			if tt.want == nil {
				if p.endpoint != nil || tt.runs && p.problem == "" {
					t.Errorf("row %v, problem %q; want none, and a reason", p.endpoint, p.problem)
				}
				return
			}
			want := base()
			tt.want(want)
			if !proto.Equal(p.endpoint, want) {
				t.Errorf("got  %v (%s)\nwant %v", p.endpoint, p.problem, want)
			}
		})
	}
}
