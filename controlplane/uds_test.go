package controlplane

import (
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/input"
	"aether/controlplane/lastgood"
	"aether/dataplane/model"
)

// TestEndpointPolicies: a policy of one source and a pod of another come together, the first source's of two
// counts, and after a restart at which nobody says it again the policy is in force still.
func TestEndpointPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := lastgood.New(filepath.Join(t.TempDir(), "last-good"))
		cfg := Config{LastGood: file, UDSDir: "/d"}
		policy := func(file string) input.Batch {
			return input.Batch{Tables: input.Tables{Policies: map[model.ServiceName][]model.EndpointPolicy{cart: {{Namespace: cart.Namespace, Name: "p", Service: cart, UDSSocket: "app/" + file}}}}}
		}
		pod := input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c1": {{
			Namespace: cart.Namespace, Name: "cart-1", Account: cart.Name, ContainerID: "c1", SPIFFEID: "spiffe://td/x", UID: "u1",
			Volumes: []model.Volume{{Name: "app", Driver: "csi.aether.io"}},
		}}}}}
		w, src := start(t, cfg, "files", "kubernetes", "pods")
		is := func(step, want string) {
			t.Helper()
			w.settled()
			got := "tcp"
			if p := w.target.last().Workload("c1"); p == nil {
				got = "no pod"
			} else if p.Socket != nil {
				got = p.Socket.File
			}
			if got != want {
				t.Errorf("%s: %s, want %s", step, got, want)
			}
		}
		src[0].Replace(input.Batch{})
		src[1].Replace(policy("k"))
		src[2].Replace(pod)
		is("a policy and a pod", "k")
		src[0].Apply(policy("f"))
		is("the first source's", "f")
		if p := w.loop.State().Problems; len(p) != 1 || p[0].Object != "EndpointPolicy of Service "+cart.String() {
			t.Errorf("two sources, and what is said is %v", p)
		}
		src[0].Apply(input.Batch{Tables: input.Tables{Policies: map[model.ServiceName][]model.EndpointPolicy{cart: nil}}})
		is("it goes", "k")
		if m := w.loop.Mesh(); len(m.Policies) != 1 || m.Policies[0].UDSSocket != "app/k" || len(m.Workloads) != 1 || m.Workloads[0].UID != "u1" {
			t.Errorf("the mesh has %+v", m.Policies)
		}
		w.stop()
		w, src = start(t, cfg, "files", "kubernetes", "pods")
		src[2].Replace(pod) // and nobody else says anything
		is("after a restart", "k")
		src[1].Replace(input.Batch{})
		is("heard again, without it", "tcp")
		w.stop()
	})
}

// TestUDSRefusedIsCounted: each pod once, until its reason is another one.
func TestUDSRefusedIsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, src := start(t, Config{UDSDir: "/d"}, "pods")
		pod := func(c, socket string) model.Workload {
			return model.Workload{Namespace: "shop", Name: c, Account: "cart", ContainerID: c, SPIFFEID: "spiffe://td/x", UID: c, UDSSocket: socket, Volumes: []model.Volume{}}
		}
		is := func(step, want string) {
			t.Helper()
			w.settled()
			got := ""
			for why := range endpointmeta.UDSReasons {
				if n := w.loop.Counters.UDSRefused[why].Value(); n > 0 {
					got += fmt.Sprintf("%s %d ", why, n)
				}
			}
			if got != want {
				t.Errorf("%s: %q, want %q", step, got, want)
			}
		}
		src[0].Replace(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c1": {pod("c1", "app/a")}, "c2": {pod("c2", "app")}, "c3": {pod("c3", "")}}}})
		is("two of three", "bad_request 1 volume_not_declared 1 ")
		src[0].Apply(input.Batch{Tables: input.Tables{Services: batch(t, "service shop/web 10.96.0.9 80").Services}})
		is("something else changes", "bad_request 1 volume_not_declared 1 ")
		src[0].Apply(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c1": {pod("c1", "app/..")}}}})
		is("another reason", "bad_request 1 bad_file 1 volume_not_declared 1 ")
		src[0].Apply(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c2": nil}}})
		src[0].Apply(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c2": nil}}})
		is("one goes", "bad_request 1 bad_file 1 volume_not_declared 1 ")
		src[0].Apply(input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{"c2": {pod("c2", "app")}}}})
		is("and comes again", "bad_request 2 bad_file 1 volume_not_declared 1 ")
		w.stop()
	})
}
