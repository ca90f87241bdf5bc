package compile

import (
	"fmt"
	"strings"
	"testing"

	"aether/dataplane/model"
)

// TestSockets: which Unix socket a pod is delivered to by, if any (contract 1.7, 10.8).
func TestSockets(t *testing.T) {
	carrier := []model.Volume{{Name: "app", Driver: "csi.aether.io"}}
	pod := func(account, annotation string, volumes []model.Volume) model.Workload {
		return model.Workload{
			Namespace: "shop", Name: account + "-1", Account: account, ContainerID: "c-" + account, SPIFFEID: "spiffe://td/ns/shop/sa/" + account,
			Ports: []model.Port{{Number: 8080, Class: model.HTTP}}, UID: "uid-" + account, UDSSocket: annotation, Volumes: volumes,
		}
	}
	named := func(account, uid string) model.Workload {
		w := pod(account, "", nil)
		w.UID = uid
		return w
	}
	policy := func(name, account, socket string) model.EndpointPolicy {
		return model.EndpointPolicy{Namespace: "shop", Name: name, Service: model.ServiceName{Namespace: "shop", Name: account}, UDSSocket: socket}
	}
	cart := model.ServiceName{Namespace: "shop", Name: "cart"}
	for _, tt := range []struct {
		name string
		do   func(x *Index)
		pods []model.Workload
		want string // of cart's pod: the socket, or the reason and whether a problem tells
	}{
		{"nobody asks", nil, []model.Workload{pod("cart", "", carrier)}, "tcp"},
		{"annotation", nil, []model.Workload{pod("cart", "app/a", carrier)}, "/d/uid-cart/a"},
		{"policy", func(x *Index) { x.SetPolicies(cart, []model.EndpointPolicy{policy("p", "cart", "app/p")}) }, []model.Workload{pod("cart", "", carrier)}, "/d/uid-cart/p"},
		{"another service's policy", func(x *Index) {
			x.SetPolicies(model.ServiceName{Namespace: "shop", Name: "web"}, []model.EndpointPolicy{policy("p", "web", "app/p")})
			x.SetPolicies(model.ServiceName{Namespace: "pay", Name: "cart"}, []model.EndpointPolicy{policy("p", "web", "app/p")})
		}, []model.Workload{pod("cart", "", carrier)}, "tcp EndpointPolicy shop/p: targetRef Service pay/cart: there is no such service in the mesh"},
		{"the annotation beats it", func(x *Index) { x.SetPolicies(cart, []model.EndpointPolicy{policy("p", "cart", "app/p")}) }, []model.Workload{pod("cart", "app/a", carrier)}, "/d/uid-cart/a"},
		{"a bad annotation beats it, too", func(x *Index) { x.SetPolicies(cart, []model.EndpointPolicy{policy("p", "cart", "app/p")}) }, []model.Workload{pod("cart", "tmp/a", carrier)},
			`tcp volume_not_declared Pod shop/cart-1: annotation endpoint.aether.io/uds-socket: "tmp/a": the pod declares no volume "tmp"`},
		{"who read the annotation tells of its form", nil, []model.Workload{pod("cart", "app", carrier)}, "tcp bad_request"},
		{"nobody else tells of a policy's", func(x *Index) { x.SetPolicies(cart, []model.EndpointPolicy{policy("p", "cart", "app")}) }, []model.Workload{pod("cart", "", carrier)},
			`tcp bad_request Pod shop/cart-1: EndpointPolicy shop/p: "app": not <volume>/<file>`},
		{"of two policies the first by name", func(x *Index) {
			x.SetPolicies(cart, []model.EndpointPolicy{policy("q", "cart", "app/q"), policy("p", "cart", "app/p")})
		}, []model.Workload{pod("cart", "", carrier)}, "/d/uid-cart/p"},
		{"it goes", func(x *Index) {
			x.SetPolicies(cart, []model.EndpointPolicy{policy("p", "cart", "app/p")})
			x.Update()
			x.SetPolicies(cart, nil)
		}, []model.Workload{pod("cart", "", carrier)}, "tcp"},
		{"switched off", func(x *Index) { x.SetUDSDir("") }, []model.Workload{pod("cart", "app/a", carrier)},
			`tcp disabled Pod shop/cart-1: annotation endpoint.aether.io/uds-socket: "app/a": delivery to Unix sockets is switched off`},
		{"a UID of two pods", nil, []model.Workload{pod("cart", "app/a", carrier), named("web", "uid-cart")},
			"tcp no_uid Pod shop/cart-1: annotation endpoint.aether.io/uds-socket: \"app/a\": pods shop/cart-1 and shop/web-1 have one UID"},
		{"a UID of three pods", nil, []model.Workload{named("web", "uid-cart"), pod("cart", "app/a", carrier), named("api", "uid-cart")},
			"tcp no_uid Pod shop/cart-1: annotation endpoint.aether.io/uds-socket: \"app/a\": pods shop/api-1 and shop/cart-1 have one UID"},
		{"a UID of three pods, in another order", nil, []model.Workload{pod("cart", "app/a", carrier), named("api", "uid-cart"), named("web", "uid-cart")},
			"tcp no_uid Pod shop/cart-1: annotation endpoint.aether.io/uds-socket: \"app/a\": pods shop/api-1 and shop/cart-1 have one UID"},
		{"a pod whose sandbox is made anew", nil, []model.Workload{pod("cart", "app/a", carrier), func() model.Workload { w := pod("cart", "app/a", carrier); w.ContainerID = "c2"; return w }()},
			"/d/uid-cart/a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := NewIndex(&model.Mesh{Domain: "aether.internal", TrustDomain: "td", Workloads: tt.pods})
			x.SetUDSDir("/d")
			x.Update()
			if tt.do != nil {
				tt.do(x)
			}
			s, problems := x.Update()
			got := "tcp"
			if to := s.Workload("c-cart").Socket; to != nil {
				got = fmt.Sprintf("%s/%s/%s", to.Dir, to.Pod, to.File)
			}
			if why := x.UDSRefused()["c-cart"]; why != 0 {
				got += " " + why.String()
			}
			for _, p := range problems {
				got += " " + p.Object + ": " + p.Reason
			}
			if !strings.HasPrefix(got, tt.want) || (got != tt.want) != strings.Contains(got, ": ") {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if strings.Contains(got, "Pod ") && !strings.Contains(got, "over TCP to 127.0.0.1") {
				t.Errorf("it does not say what holds: %s", got)
			}
		})
	}
}
