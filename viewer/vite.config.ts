import { defineConfig } from "vite";

// The build is committed: file names without hashes, relative addresses, nothing that depends on the machine.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../colonnade/look/static",
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1000,
    rollupOptions: {
      output: {
        entryFileNames: "viewer.js", assetFileNames: "viewer[extname]", chunkFileNames: "[name].js",
        inlineDynamicImports: true,
      },
    },
  },
});
