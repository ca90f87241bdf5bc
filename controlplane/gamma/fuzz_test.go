package gamma

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/json"

	"aether/controlplane/input"
)

// FuzzObjects: no object stops State; said again it says nothing new; and nothing is
// left of it, problems included, once it is deleted.
func FuzzObjects(f *testing.F) {
	kinds := []string{KindHTTPRoute, KindGRPCRoute, KindTCPRoute, KindTLSRoute, KindUDPRoute, KindReferenceGrant, KindHTTPFilter, KindEndpointPolicy, KindMeshConfig}
	for i, text := range []string{
		`{"metadata":{"name":"r","namespace":"shop"},"spec":{"parentRefs":[{"kind":"Service","group":"","name":"cart"}],"rules":[{"matches":[{"path":{"type":"Exact","value":"/a"},"headers":[{"name":"a","value":"b"}]}],"backendRefs":[{"name":"pg","namespace":"db","port":80,"weight":3,"filters":[{"type":"RequestMirror","requestMirror":{"backendRef":{"name":"x","port":1}}}]}]}]}}`,
		`{"metadata":{"name":"r","namespace":"shop"},"spec":{"parentRefs":[{"kind":"Service","name":"cart"}],"rules":[{"matches":[{"method":{"service":"a.B","method":"C"}}]}]}}`,
		`{"metadata":{"name":"r","namespace":"shop"},"spec":{"parentRefs":[{"kind":"Service","name":"cart"}],"rules":[{"backendRefs":[{"name":"pg","port":1}]}]}}`,
		`{"metadata":{"name":"r","namespace":"shop"},"spec":{"hostnames":["*.a.example"],"parentRefs":[{"kind":"Service","name":"cart"}],"rules":[{}]}}`,
		`{"metadata":{"name":"u","namespace":"shop"},"spec":{"parentRefs":[{"kind":"Service","name":"dns","port":5e3}]}}`,
		`{"metadata":{"name":"g","namespace":"db"},"spec":{"from":[{"group":"gateway.networking.k8s.io","kind":"HTTPRoute","namespace":"shop"}],"to":[{"group":"","kind":"Service"}]}}`,
		`{"metadata":{"name":"f","namespace":"shop"},"spec":{"filter":"envoy.filters.http.header_mutation","typedConfig":{"@type":"type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation","mutations":{"request_mutations":[{"remove":"x"}]}}}}`,
		`{"metadata":{"name":"e","namespace":"shop"},"spec":{"targetRef":{"kind":"Service","name":"cart"},"udsSocket":"a/b"}}`,
		`{"metadata":{"name":"default","namespace":"aether-system"},"spec":{"routeSemantics":"GatewayAPI","proxy":{"traceSampleRate":0.5}}}`,
	} {
		f.Add(uint8(i), []byte(text))
	}
	f.Fuzz(func(t *testing.T, kind uint8, text []byte) {
		var u map[string]any
		if json.Unmarshal(text, &u) != nil {
			return
		}
		k := kinds[int(kind)%len(kinds)]
		s := NewState("", input.Settings{})
		s.Set(k, u)
		s.Take()
		s.Set(k, u)
		if b := s.Take(); !b.Empty() {
			t.Fatalf("the same object again says %+v", b)
		}
		o := FromAPI(k, u)
		s.Delete(k, o.Namespace, o.Name)
		if b := s.Whole(); len(b.Routes)+len(b.Filters)+len(b.Problems) > 0 || *b.Settings != (input.Settings{}) || s.Count(k) != 0 {
			t.Fatalf("what is deleted leaves %+v", b)
		}
		if len(s.pointing)+len(s.grants)+len(s.policies)+len(s.aimed)+len(s.meshes)+len(s.problems) > 0 {
			t.Fatalf("what is deleted leaves %+v", s)
		}
	})
}
