package server

import (
	"crypto/tls"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// TestWhoMayCall: members of the trust domain may watch and list, those that
// Config.Writer names may write, and nobody else is let in.
func TestWhoMayCall(t *testing.T) {
	open := func(td string) *devca.CA {
		ca, err := devca.Open(t.TempDir(), td, nil)
		if err != nil {
			t.Fatal(err)
		}
		return ca
	}
	ours, other, foreign := open("mesh.test"), open("mesh.test"), open("foreign.test")
	issue := func(ca *devca.CA, ns, account string) *mtls.SVID {
		id, err := spiffeid.ForServiceAccount(ca.TrustDomain(), ns, account)
		if err != nil {
			t.Fatal(err)
		}
		svid, err := ca.Issue(id, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return svid
	}
	self, agent, pod := issue(ours, "aether-system", "aether-registrar"), issue(ours, "aether-system", "aether-agent"), issue(ours, "shop", "cart")
	believing := func(svid *mtls.SVID) *mtls.SVID { // it takes our registrar for genuine, so that it is ours that judges
		c := *svid
		c.Roots = ours.Roots()
		return &c
	}

	store := storetest.New("local", "local")
	store.Set(httpRows(cart, "10.0.0.1")...)
	r := start(t, Config{
		Store:  store,
		TLS:    mtls.ServerConfig(mtls.Server{SVID: func() *mtls.SVID { return self }, Named: true}),
		Writer: func(id spiffeid.ID) bool { return id == agent.ID },
	})
	for _, tt := range []struct {
		name        string
		svid        *mtls.SVID
		read, write codes.Code
	}{
		{"the node's agent", agent, codes.OK, codes.OK},
		{"a pod", pod, codes.OK, codes.PermissionDenied},
		{"an agent of an authority that is not ours", believing(issue(other, "aether-system", "aether-agent")), codes.Unavailable, codes.Unavailable},
		{"an agent of another trust domain", believing(issue(foreign, "aether-system", "aether-agent")), codes.Unavailable, codes.Unavailable},
		{"nobody", nil, codes.Unavailable, codes.Unavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}
			if tt.svid != nil {
				cfg = mtls.ClientConfig(mtls.Client{SVID: tt.svid, SNI: "aether-registrar.aether-system.svc", ALPN: []string{"h2"}, Pin: self.ID})
			}
			c := r.dial(grpc.WithTransportCredentials(credentials.NewTLS(cfg)))
			_, err := c.ListAllEndpoints(t.Context(), &registrypb.ListAllEndpointsRequest{})
			if status.Code(err) != tt.read {
				t.Errorf("a list: %v, want %v", err, tt.read)
			}
			if tt.read == codes.OK {
				newNode(t).watch(c, &registrypb.WatchEndpointsRequest{}).complete()
			}
			_, err = c.RegisterEndpoint(t.Context(), &registrypb.RegisterEndpointRequest{ServiceName: "shop/cart", Endpoint: storetest.HTTP("10.0.0.1", "node-a")})
			if status.Code(err) != tt.write {
				t.Errorf("a registration: %v, want %v", err, tt.write)
			}
			_, err = c.UnregisterEndpoint(t.Context(), &registrypb.UnregisterEndpointRequest{ServiceName: "shop/none", Ips: []string{"10.0.0.9"}})
			if status.Code(err) != tt.write {
				t.Errorf("a removal: %v, want %v", err, tt.write)
			}
		})
	}
	if r.denied.Value() != 2 {
		t.Errorf("%d calls denied, want 2", r.denied.Value())
	}

	// Nobody ends the watch of another identity by using its names.
	as := func(svid *mtls.SVID) *node {
		cfg := mtls.ClientConfig(mtls.Client{SVID: svid, ALPN: []string{"h2"}, Pin: self.ID})
		return newNode(t).watch(r.dial(grpc.WithTransportCredentials(credentials.NewTLS(cfg))), &registrypb.WatchEndpointsRequest{ClusterName: "local", NodeName: "node-a", Instance: "1"}).complete()
	}
	first := as(agent)
	as(pod)
	store.Set(httpRows(pay, "10.0.0.2")...)
	first.until("a row", func() bool { return len(first.rows) == 2 })
}
