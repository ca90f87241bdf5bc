package faults

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrar/server/storetest"
	"aether/controlplane/registrypb"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// stalledWatcher is case 143: somebody with a good certificate watches everything and reads
// nothing. Nodes hear what changes meanwhile all the same, and requests go on.
func stalledWatcher(w *world) {
	const td, rows = "rig.test", 600 // more bytes than a stream of 64 KiB takes unread
	ca, err := devca.Open(filepath.Join(w.Rig.Dir, "throw-away-ca"), td, time.Now)
	w.must(err)
	identity := func(account string) spiffeid.ID {
		id, err := spiffeid.ForServiceAccount(td, "aether-system", account)
		w.must(err)
		return id
	}
	svid, err := ca.Issue(identity("aether-agent"), time.Hour)
	w.must(err)
	node := &w.Rig.Nodes[1].Space
	conn, err := grpc.NewClient("passthrough:///"+net.JoinHostPort(w.Rig.Nodes[0].IP4.String(), "8443"),
		grpc.WithTransportCredentials(client.TLS(func() *mtls.SVID { return svid }, identity("aether-registrar"))),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) { return node.Dial(ctx, "tcp", addr) }),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	w.must(err)
	defer conn.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := registrypb.NewRegistrarServiceClient(conn).WatchEndpoints(ctx, &registrypb.WatchEndpointsRequest{ClusterName: "local", NodeName: "stalled"})
	w.must(err)
	for { // it has a first state, and reads no more from there on
		ev, err := stream.Recv()
		w.must(err)
		if ev.GetType() == registrypb.WatchEndpointsResponse_EVENT_TYPE_SNAPSHOT_COMPLETE {
			break
		}
	}
	l := w.begin()
	l.more(rps)
	const key = "/aether/v1/regions/other/clusters/other/ns/shop/services/stock/protocols/PROTOCOL_HTTP/endpoints/%s" // contract 9.5
	ip := func(i int) string { return fmt.Sprintf("10.8.%d.%d", i/250, 1+i%250) }
	for i := range rows {
		b, err := proto.Marshal(storetest.HTTP(ip(i), "far"))
		w.must(err)
		w.must(w.PutKey(w.ctx, fmt.Sprintf(key, ip(i)), b))
	}
	p := w.cart("cart-7", 1)
	w.healthy("cart-7")
	w.must(w.AwaitUsable(w.ctx, 0, p, true))
	l.until("an answer of the new pod", func() bool { return l.from["cart-7"] > 0 })
	w.step()
	w.must(w.Terminate("cart-7"))
	w.must(w.AwaitUsable(w.ctx, 0, p, false))
	l.more(rps)
	w.must(w.RemovePod("cart-7"))
	w.must(w.AwaitRows(w.ctx, p, ""))
	for i := range rows {
		w.must(w.PutKey(w.ctx, fmt.Sprintf(key, ip(i)), nil))
	}
	l.check("a watcher that does not read")
}
