package main

import (
	"log/slog"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"aether/controlplane/registrypb"
	"aether/e2e/cluster/apiserver"
)

// TestKubernetes: over a real API server the registrar serves what pods say, and keeps
// the Service of theirs (contract 9.6, 9.8).
func TestKubernetes(t *testing.T) {
	api := apiserver.Start(t)
	ctx, c := t.Context(), api.Client(t)
	shop, home := api.Namespace(t), api.Namespace(t)
	api.Account(t, shop, "cart")
	pod, err := c.CoreV1().Pods(shop).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "cart-1", Labels: map[string]string{"aether.io/managed": "true"},
			Annotations: map[string]string{"endpoint.aether.io/port": "8080", "endpoint.aether.io/ports": "8080,5432=tcp"},
		},
		Spec: corev1.PodSpec{ServiceAccountName: "cart", Containers: []corev1.Container{{Name: "app", Image: "app"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: "10.0.0.1", PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}
	if _, err := c.CoreV1().Pods(shop).UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}

	args := []string{"--store", "kubernetes", "--kubeconfig", apiserver.Kubeconfig(t, api.Config()), "--insecure", "--namespace", home, "--identity", "one"}
	store, end, err := openStore(parsed(t, args...), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	rpc, _, _ := serving(t, store, args...)
	conn, err := grpc.NewClient(rpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	until(t, "the pod's row", func() bool {
		got, err := registrypb.NewRegistrarServiceClient(conn).ListAllEndpoints(ctx, &registrypb.ListAllEndpointsRequest{})
		rows := got.GetServices()[shop+"/cart"].GetEndpoints()
		return err == nil && len(rows) == 1 && rows[0].GetIp() == "10.0.0.1" && rows[0].GetHealth() == registrypb.ServiceEndpoint_HEALTHY
	})
	until(t, "its Service", func() bool {
		s, err := c.CoreV1().Services(shop).Get(ctx, "cart", metav1.GetOptions{})
		if err != nil {
			return false
		}
		var ports []string
		for _, p := range s.Spec.Ports {
			ports = append(ports, p.Name)
		}
		slices.Sort(ports)
		return slices.Equal(ports, []string{"mesh", "mesh-tcp", "p5432-tcp", "p8080-tcp"})
	})
}
